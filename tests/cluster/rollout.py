"""Updates the DaemonSet on one node of a real cluster and watches what that costs pods: python tests/cluster/rollout.py NODE RESOURCE.

One pod holds a device all the time, others ask for one each and end at once. All must be admitted, the holder's container must
be the same in the end, and the node's status must never show fewer devices. For people: it needs a cluster and kubectl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

NAMESPACE = "fairlead-trial"
OLD_ENOUGH = 6.0
"""Seconds between a DaemonSet's creation and its first rollout: one that is younger has pods replaced without surge."""


def kubectl(*arguments: str, text: str | None = None) -> str:
    """What kubectl prints; exits where it fails."""
    done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def get(*arguments: str) -> Any:
    """An object, or a list of them."""
    return json.loads(kubectl("get", *arguments, "--output", "json"))


def pod(name: str, command: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """A pod that asks for one device."""
    container = {
        "name": "main",
        "image": wanted.image,
        "command": ["sh", "-c", command],
        "resources": {"limits": {wanted.resource: "1"}},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "nodeSelector": {"kubernetes.io/hostname": wanted.node},
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait a minute for this."""
    end = time.monotonic() + 60
    while not holds():
        if time.monotonic() > end:
            sys.exit(f"Waited a minute in vain: {what}")
        time.sleep(0.3)


class Offered:
    """What the node's status says of the resource, in the background."""

    def __init__(self, node: str, resource: str) -> None:
        self.seen: list[int] = []
        path = resource.replace(".", r"\.")
        wanted = f"jsonpath={{.status.allocatable['{path}']}}{{'\\n'}}"
        command = ["kubectl", "get", "node", node, "--watch", "--output", wanted]
        self._watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._watch.stdout is not None
        self.seen.extend(number(line.strip()) for line in self._watch.stdout)

    def stop(self) -> list[int]:
        """Each number that it said, in their order."""
        self._watch.terminate()
        return self.seen


def number(quantity: str) -> int:
    """Of a quantity as Kubernetes writes it; 1000 is `1k`."""
    return int(quantity.removesuffix("k") or 0) * (1000 if quantity.endswith("k") else 1)


def states(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The status of each of these pods."""
    return {
        it["metadata"]["name"]: it["status"]
        for it in get("pods", "-n", NAMESPACE)["items"]
        if it["metadata"]["name"] in names
    }


def main() -> int:
    """Run it; 0: nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("node")
    parser.add_argument("resource", help="one of which the node has two devices free, or more")
    parser.add_argument("--daemonset", default="fairlead")
    parser.add_argument("--namespace", default="fairlead", help="the DaemonSet's")
    parser.add_argument("--image", default="busybox", help="one with sh and sleep")
    wanted = parser.parse_args()
    daemons = ("daemonset", wanted.daemonset, "-n", wanted.namespace)
    get(*daemons)
    kubectl("create", "namespace", NAMESPACE)
    try:
        return try_it(wanted, daemons)
    finally:
        kubectl("delete", "namespace", NAMESPACE)


def try_it(wanted: argparse.Namespace, daemons: Sequence[str]) -> int:
    """A rollout under a stream of pods, and what became of them."""
    kubectl("apply", "-f", "-", text=json.dumps(pod("holder", "sleep 3600", wanted)))
    until(lambda: states(["holder"])["holder"]["phase"] == "Running", "the pod that holds a device runs")
    holder = states(["holder"])["holder"]["containerStatuses"][0]["containerID"]
    offered, names = Offered(wanted.node, wanted.resource), list[str]()
    time.sleep(OLD_ENOUGH)
    kubectl("rollout", "restart", *daemons)
    rollout = subprocess.Popen(["kubectl", "rollout", "status", *daemons, "--timeout=10m"], stdout=subprocess.DEVNULL)
    quiet_since = 0.0  # some more pods after the last daemon was replaced
    while rollout.poll() is None or time.monotonic() - quiet_since < 5:
        if rollout.poll() is None:
            quiet_since = time.monotonic()
        names.append(f"short-{len(names)}")
        kubectl("apply", "-f", "-", text=json.dumps(pod(names[-1], "true", wanted)))
        time.sleep(0.4)
    until(lambda: all(it["phase"] in ("Succeeded", "Failed") for it in states(names).values()), "the short pods end")
    refused = {name: it.get("message", "") for name, it in states(names).items() if it["phase"] == "Failed"}
    same = states(["holder"])["holder"]["containerStatuses"][0]["containerID"] == holder
    seen = offered.stop()
    print(f"{len(names)} pods asked for a device during the rollout, {len(refused)} were refused: {refused}")
    print(f"The node's status said {', '.join(map(str, dict.fromkeys(seen)))} of {wanted.resource}")
    print(f"The pod that held a device has {'the same' if same else 'ANOTHER'} container")
    return int(bool(refused) or not same or not seen or min(seen) < seen[0] or rollout.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
