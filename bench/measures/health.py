"""From what the kernel says of a GPU to the list in which it is Unhealthy: `unhealthy_to_list`, `xid_to_list`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.measures.lists import Samples, Side, in_turn_with_baseline
from bench.names import resource_names
from bench.processes import Agent, Offer
from tests.backends.machines import CONTROLS, nvidia_gpu
from tests.backends.trees import plant
from tests.e2e import hermetic
from tests.e2e.kmsg import KernelLog

_REPLICAS: Final = 8  # of each GPU: 125 GPUs are 1,000 devices to the kubelet

_UNHEALTHY: Final = (
    f"an injected uevent with ERROR_EVENT of a GPU with {_REPLICAS} replicas: it fails, and is recovered; until the whole "
    "list is in the kubelet"
)
_XID: Final = (
    f"a line of the kernel's log with an XID of a GPU with {_REPLICAS} replicas, of another one each time; until the whole "
    "list is in the kubelet"
)


def unhealthy_to_list(devices: int, events: int) -> Figure:
    """One GPU after the other has a PCI error, and is recovered: twice as many events as there are GPUs, at most."""
    agent, baseline = hermetic.call(f"{__name__}:_recoveries", devices, events, timeout=60 + events)
    return figure("unhealthy_to_list", f"{devices:,}", "ms", agent, baseline, _UNHEALTHY)


def xid_to_list(devices: int, events: int) -> Figure:
    """One GPU after the other has an XID: as many events as there are GPUs, at most."""
    agent, baseline = in_turn_with_baseline(lambda home: _gpus(home, devices), _fails, devices, "one", events)
    return figure("xid_to_list", f"{devices:,}", "ms", agent, baseline, _XID)


def _recoveries(devices: int, events: int) -> Samples:
    return in_turn_with_baseline(lambda home: _gpus(home, devices), _fails_and_recovers, devices, "one", events)


def _gpus(home: Path, devices: int) -> Agent:
    agent = Agent(home, [Offer(resource_names(1)[0], backend="gpu", replicas=_REPLICAS)])
    plant(home, CONTROLS + "".join(nvidia_gpu(_address(n), n) for n in range(devices // _REPLICAS)))
    return agent


def _address(number: int) -> str:
    return f"0000:{number:02x}:00.0"


def _fails_and_recovers(agent: Agent) -> Side:
    """Another GPU each time: one that flaps would be quarantined."""
    injector, events = hermetic.Injector(), count()

    def cause() -> None:
        number, recovers = divmod(next(events), 2)
        step = "SUCCESSFUL_RECOVERY" if recovers else "BEGIN_RECOVERY"
        path = f"/devices/pci0000:00/{_address(number)}"
        injector.kernel("change", path, "pci", ERROR_EVENT=step, PCI_CLASS="30200", PCI_ID="10DE:2330")

    return Side(Kubelet(agent.plugin_dir), cause, _shows(lambda event: 1 - event % 2))


def _fails(agent: Agent) -> Side:
    log, numbers = KernelLog(agent.node("kmsg")), count()

    def cause() -> None:
        log.say(f"NVRM: Xid (PCI:{_address(next(numbers))[:-2]}): 79, pid=1234, GPU has fallen off the bus.")

    return Side(Kubelet(agent.plugin_dir), cause, _shows(lambda event: event + 1))


def _shows(unhealthy: Callable[[int], int]) -> Callable[[Any, int], None]:
    """A check that the replicas of so many GPUs are Unhealthy after each event."""

    def check(found: Any, event: int) -> None:
        bad = [device.health for device in found.devices].count("Unhealthy")
        if bad != unhealthy(event) * _REPLICAS:
            raise RuntimeError(
                f"the list shows {bad} unhealthy devices after event {event}: it is not about that event"
            )

    return check
