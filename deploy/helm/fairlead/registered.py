"""Fails unless the daemon of this node answers and the kubelet listens to every resource: the chart's test runs this."""

import json
import subprocess
import sys

answer = subprocess.run(["fairlead", "status", "--json"], stdout=subprocess.PIPE, check=True)  # noqa: S607
status = json.loads(answer.stdout)
missing = [one["name"] for one in status["resources"] if not (one["registered"] and one["streaming"])]
if missing:
    sys.exit(f"not registered with the kubelet: {', '.join(missing)}; ask `fairlead doctor` in the DaemonSet's pod")
print(f"registered on {status['node']}: {', '.join(one['name'] for one in status['resources'])}")
