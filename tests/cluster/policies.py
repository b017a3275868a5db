"""Attacks a real API server with the token of a Fairlead pod, as a thief would: python tests/cluster/policies.py NODE.

What the agent itself writes must be taken, all else be refused. Every request is a dry run and changes nothing. For people:
it needs a cluster with two nodes or more, an administrator's kubectl, and the components `events` and `condition`.
"""

from __future__ import annotations

import argparse
import base64
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

from agent.kubernetes import events
from agent.kubernetes.api import STRATEGIC
from agent.kubernetes.own_node import TYPE

MERGE, PATCHES, APPLY = "application/merge-patch+json", "application/json-patch+json", "application/apply-patch+yaml"
NEW = "application/json"  # is posted, not patched
OWN, FOREIGN = "fairlead-trial", "fairlead-trial-foreign"  # events that are there while this runs

Object = dict[str, Any]
Attack = tuple[str, str, Any, str]
"""What it is, whereto, with which body, of which kind."""


def get(*arguments: str) -> Any:
    """What kubectl prints, as JSON; exits where it fails."""
    done = subprocess.run(["kubectl", *arguments, "--output", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


class Server:
    """The API server, asked with one token."""

    def __init__(self, token: str) -> None:
        (cluster,) = (it["cluster"] for it in get("config", "view", "--minify", "--flatten")["clusters"])
        authority = cluster.get("certificate-authority-data")
        self._url, self._token = cluster["server"], token
        self._tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode() if authority else None)
        if cluster.get("insecure-skip-tls-verify"):
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def send(self, path: str, body: Any, content: str, *, dry: bool = True) -> tuple[int, Object]:
        """The status, and the object that would be there or a refusal."""
        options = ["dryRun=All"] * dry + ["fieldManager=thief", "force=true"] * (content == APPLY)
        request = urllib.request.Request(
            f"{self._url}{path}?{'&'.join(options)}",
            data=json.dumps(body).encode(),
            method="POST" if content == NEW else "PATCH",
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": content},
        )
        try:
            with urllib.request.urlopen(request, context=self._tls, timeout=30) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


def condition(message: str = "every device can be given to pods", **more: str) -> Object:
    """One of a node's."""
    now = events.timestamp(time.time())
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    return {"type": TYPE, "status": "True", "reason": "DevicesHealthy", "message": message, **times, **more}


def event(node: str, namespace: str = "default", **more: Any) -> Object:
    """An Event as the agent writes it, about the node; `more` is written over it."""
    pod = events.Subject("Pod", "some-pod", "", namespace)
    about = events.about_node(node) if namespace == "default" else pod
    notice = events.Notice(about, "DeviceUnhealthy", "gpu0", "a trial", is_warning=True)
    now = time.time()
    return events.event(notice, f"{about.name}.{int(now * 1e9):x}", now, now, 1, node) | more


def ours(node: str) -> Iterator[Attack]:
    """What the agent writes."""
    status = f"/api/v1/nodes/{node}/status"
    yield "its condition", status, {"status": {"conditions": [condition()]}}, STRATEGIC
    yield (
        "its condition, changed",
        status,
        {"status": {"conditions": [condition("1 unhealthy", status="False")]}},
        STRATEGIC,
    )
    yield "its condition, 1100 characters", status, {"status": {"conditions": [condition("ä" * 1100)]}}, STRATEGIC
    yield "an event about the node", "/api/v1/namespaces/default/events", event(node), NEW
    yield "an event about a pod", "/api/v1/namespaces/kube-system/events", event(node, "kube-system"), NEW
    again = {"message": "again", "lastTimestamp": events.timestamp(time.time()), "count": 2}
    yield "its event once more", f"/api/v1/namespaces/default/events/{OWN}", again, STRATEGIC


def metadata(node: Object) -> Iterator[tuple[str, Object]]:
    """Patches of what belongs to the node's administrators."""
    yield "a label", {"labels": {"trial": "1"}}
    yield "a label of node-restriction.kubernetes.io", {"labels": {"node-restriction.kubernetes.io/trial": "1"}}
    yield "a role", {"labels": {"node-role.kubernetes.io/control-plane": ""}}
    yield "a label away", {"labels": {next(iter(node["metadata"]["labels"])): None}}
    yield "a label another", {"labels": {next(iter(node["metadata"]["labels"])): "trial"}}
    yield "an annotation", {"annotations": {"fairlead.dev/drain": "gpu0"}}
    yield "a finalizer", {"finalizers": ["trial.test/x"]}
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "11111111-1111-1111-1111-111111111111"}
    yield "an owner", {"ownerReferences": [owner]}


def status(node: Object) -> Iterator[tuple[str, Object]]:
    """Patches of what belongs to the kubelet."""
    for key in ("capacity", "allocatable"):
        yield f"{key}: a resource more", {key: {"trial.test/x": "3"}}
        yield f"{key}: another number", {key: {"pods": "1"}}
        yield f"{key}: away", {key: None}
    for kind in ("Ready", "DiskPressure", "TrialPressure", f"{TYPE}Too"):
        yield f"the condition {kind}", {"conditions": [condition(type=kind, status="False")]}
    yield "the condition Ready beside its own", {"conditions": [condition(), condition(type="Ready", status="False")]}
    yield "the condition Ready away", {"conditions": [{"type": "Ready", "$patch": "delete"}]}
    yield "all conditions away", {"conditions": None}
    yield "all conditions but its own away", {"conditions": [{"$patch": "replace"}, condition()]}
    yield "the condition Ready another heartbeat", {"conditions": [{"type": "Ready", "lastHeartbeatTime": None}]}
    yield "its condition of 1101 characters", {"conditions": [condition("x" * 1101)]}
    yield "its condition with a long reason", {"conditions": [condition(reason="x" * 101)]}
    yield "an address", {"addresses": [{"type": "ExternalIP", "address": "192.0.2.1"}]}
    yield "the kubelet's port", {"daemonEndpoints": {"kubeletEndpoint": {"Port": 6666}}}
    yield "the kubelet's version", {"nodeInfo": {"kubeletVersion": "v9.9.9"}}
    yield "an image", {"images": [{"names": ["trial.test/x"], "sizeBytes": 1}]}
    yield "a volume in use", {"volumesInUse": ["trial"]}
    yield "a volume attached", {"volumesAttached": [{"name": "trial", "devicePath": "/dev/x"}]}
    yield "a runtime handler", {"runtimeHandlers": [{"name": "trial"}]}
    yield "its phase", {"phase": "Terminated"}
    has = node["status"].get("features", {}).get("supplementalGroupsPolicy", False)
    yield "its features", {"features": {"supplementalGroupsPolicy": not has}}
    yield "its configuration", {"config": {"error": "trial"}}


def refused_events(node: str, other: str) -> Iterator[tuple[str, Object]]:
    """What an Event may not say."""
    yield "from another node", event(node, source={"component": "fairlead", "host": other})
    yield "from the kubelet", event(node, source={"component": "kubelet", "host": node})
    yield "from no one", event(node, source={})
    yield "reported by the kubelet", event(node, reportingComponent="kubelet")
    yield "reported by another node", event(node, reportingInstance=other)
    about = event(node)["involvedObject"]
    yield "about another node", event(node, involvedObject=about | {"name": other, "uid": other})
    yield "about this node with another's UID", event(node, involvedObject=about | {"uid": other})
    yield "about a Node of another API", event(node, involvedObject=about | {"apiVersion": "trial.test/v1"})
    yield "about a Deployment", event(node, involvedObject={"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"})
    yield "about a Namespace", event(node, involvedObject={"apiVersion": "v1", "kind": "Namespace", "name": "default"})
    yield "about nothing", event(node, involvedObject={})
    yield "beside another object", event(node, related={"kind": "Node", "name": other})
    yield "with a finalizer", event(node, metadata=event(node)["metadata"] | {"finalizers": ["trial.test/x"]})


def attacks(node: Object, other: str) -> Iterator[Attack]:
    """What must be refused."""
    name = node["metadata"]["name"]
    where, elsewhere = f"/api/v1/nodes/{name}/status", f"/api/v1/nodes/{other}/status"
    mine = {"status": {"conditions": [condition()]}}
    yield "another node's condition", elsewhere, mine, STRATEGIC
    applied = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": other}, **mine}
    yield "another node's condition, applied", elsewhere, applied, APPLY
    labelled = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"trial": "1"}}}
    yield "a label, applied", where, labelled, APPLY
    yield (
        "its condition twice",
        where,
        [{"op": "add", "path": "/status/conditions/-", "value": condition()}] * 2,
        PATCHES,
    )
    yield "all of its conditions, merged", where, mine, MERGE
    yield (
        "an order of conditions",
        where,
        [{"op": "move", "from": "/status/conditions/0", "path": "/status/conditions/1"}],
        PATCHES,
    )
    for what, part in metadata(node):
        yield what, where, {"metadata": part}, MERGE
    for what, part in status(node):
        yield what, where, {"status": part}, STRATEGIC
    yield "the node itself", where.removesuffix("/status"), {"spec": {"unschedulable": True}}, MERGE
    for what, it in refused_events(name, other):
        yield f"an event {what}", "/api/v1/namespaces/default/events", it, NEW
    yield (
        "an event of its own given away",
        f"/api/v1/namespaces/default/events/{OWN}",
        {"reportingInstance": other},
        MERGE,
    )
    foreign = f"/api/v1/namespaces/default/events/{FOREIGN}"
    yield "an event of others", foreign, {"message": "trial"}, MERGE
    taken = {key: event(name)[key] for key in ("source", "reportingComponent", "reportingInstance", "involvedObject")}
    yield "an event of others, taken over", foreign, taken, MERGE


def unlike(before: Object, after: Object) -> bool:
    """Whether anything of a Node is another, but what the agent may write."""

    def kept(node: Object) -> Object:
        metadata = {key: it for key, it in node["metadata"].items() if key not in ("managedFields", "resourceVersion")}
        others = [it for it in node["status"].get("conditions", []) if it["type"] != TYPE]
        return {"metadata": metadata, "spec": node["spec"], "status": node["status"] | {"conditions": others}}

    return after["kind"] == "Node" and kept(before) != kept(after)


def main() -> None:
    """Try it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("node", help="one on which a pod of Fairlead is")
    name = parser.parse_args().node
    labels = "app.kubernetes.io/part-of=fairlead,app.kubernetes.io/component=device-plugin"
    pods = get("get", "pods", "-A", "--selector", labels, "--field-selector", f"spec.nodeName={name}")["items"]
    other = next(it["metadata"]["name"] for it in get("get", "nodes")["items"] if it["metadata"]["name"] != name)
    if not pods:
        sys.exit(f"no pod of Fairlead is on {name}")
    pod, account = pods[0]["metadata"], pods[0]["spec"]["serviceAccountName"]
    bound = ["--bound-object-kind", "Pod", "--bound-object-name", pod["name"], "--namespace", pod["namespace"]]
    thief = Server(get("create", "token", account, *bound)["status"]["token"])
    unbound = Server(get("create", "token", account, "--namespace", pod["namespace"])["status"]["token"])
    wrong = 0

    def tell(what: str, code: int, said: Object, *, is_well: bool) -> None:
        nonlocal wrong
        wrong += not is_well
        print("well " if is_well else "WRONG", what, code, said.get("message", "")[:200])

    try:
        thief.send("/api/v1/namespaces/default/events", event(name) | {"metadata": {"name": OWN}}, NEW, dry=False)
        foreign = {"name": FOREIGN, "namespace": "default"}
        text = json.dumps(event(name, metadata=foreign, source={"component": "kubelet", "host": name}))
        subprocess.run(["kubectl", "create", "-f", "-"], input=text, text=True, check=True, capture_output=True)
        for what, path, body, content in ours(name):
            code, said = thief.send(path, body, content)
            tell(f"is taken: {what}", code, said, is_well=code < 300)
            code, said = unbound.send(path, body, content)
            tell(f"is refused without a pod: {what}", code, said, is_well=code in (403, 422))
        node = get("get", "node", name)
        for what, path, body, content in attacks(node, other):
            code, said = thief.send(path, body, content)
            is_lost = code < 300 and said["kind"] == "Node" and not unlike(node, said)
            tell(f"is refused: {what}", code, {} if is_lost else said, is_well=is_lost or code in (403, 422))
    finally:
        subprocess.run(["kubectl", "delete", "events", OWN, FOREIGN, "--ignore-not-found"], check=False)
    print(f"{wrong} are wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
