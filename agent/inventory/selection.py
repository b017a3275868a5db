"""Keeps the resources in force, and says which of them select a device: that is `Found` then, with a `Candidate` for each.

A template stands for resources that devices bring into force by joining them, and pods by holding of them. They stay until
they have had neither for long (`inventory.KEPT`), the process ends, or a reload takes the template away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agent.config.resources import NamelessError, fits, is_distinctive, name_of
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.model import Health
from agent.runtime.errors import shown
from backends.base import Backend, Device, Resource


class Candidate(Struct, frozen=True, gc=False):
    """A resource that selects a device, and the IDs it would have there."""

    resource: str
    order: int
    ids: tuple[str, ...]
    value: str = ""
    """Of which value a template made the resource's name; empty if none did."""


Ref = tuple[str, str, str, str]
"""Names one found device: backend, unit, the resource it was built for or "", key."""


class Found(Struct, gc=False, eq=False):
    """A device that was found, and what was decided of it last; the same only as itself."""

    backend: str
    unit: str
    device: Device
    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    """Why the resources that do not select it do not."""
    placed: Candidate | None = None
    """The one that it joined, if any."""
    lost: tuple[str, ...] = ()
    """Why the resources that do select it did not get it."""
    barred: Health | None = None
    """Why no further pod may have it although it is well, if that is so."""
    is_plain: bool | None = False
    """Whether it shares hardware and IDs with no other device and all are Healthy: a pod may get one, and no slot changes. None: look."""

    @property
    def ref(self) -> Ref:
        """Names it."""
        return self.backend, self.unit, self.device.resource or "", self.device.key

    @property
    def why(self) -> str:
        """Why no resource has it, if none has."""
        homeless = f"it was made for {self.device.resource}, which is not configured for its backend"
        return "; ".join(self.lost + self.refused) or homeless

    def why_not(self, resource: str) -> str:
        """Why a resource that selects it does not have it: "selects it, but …"."""
        lost = dict(refusal.split(" ", 1) for refusal in self.lost)
        has = self.placed.resource if self.placed else ""
        return lost.get(resource, f"selects it, but {has} comes before it in the configuration and has it")


class Selection:
    """The resources by their names, in the order of the config."""

    def __init__(
        self,
        resources: Sequence[Resource[Any]],
        backends: Mapping[str, Backend[Any]],
        before: Selection | None = None,
    ) -> None:
        """Take these in.

        Args:
            resources: in their order.
            backends: by their kinds.
            before: what was configured, if another configuration was in force: the resources that its templates have
                given stay in force, as far as there are such templates, and as these are now.
        """
        self.written: Mapping[str, Resource[Any]] = {resource.name: resource for resource in resources}
        """As the config has them, templates included."""
        self.resources = {name: resource for name, resource in self.written.items() if not resource.is_template}
        """Those in force: of a template the resources that it has given."""
        self.stands_for: dict[str, str] = {}
        """Name → of which value a template made it, where a device has it by now."""
        self.broken: dict[str, str] = {}
        """Resource → how its backend failed last to tell the IDs of a device."""
        self._backends = backends
        self._order = {name: n for n, name in enumerate(self.written)}
        self._of_kind: defaultdict[str, list[Resource[Any]]] = defaultdict(list)
        for resource in resources:
            self._of_kind[resource.spec.backend].append(resource)
        self._templates = [resource for resource in resources if resource.is_template]
        self.has_templates = bool(self._templates)
        """Whether resources may come into force, and go."""
        for name, resource in before.resources.items() if before else ():
            now = self.written.get(resource.template)
            if before and now is not None and now.spec.backend == resource.spec.backend:
                self.bring(name, now.spec.backend, before.stands_for.get(name, ""))

    def kind(self, name: str) -> str | None:
        """The backend of a resource or template; None while it retires."""
        resource = self.resources.get(name) or self.written.get(name)
        return resource.spec.backend if resource else None

    def of_kind(self, kind: str) -> Sequence[Resource[Any]]:
        """The resources of a backend, templates included, in their order."""
        return self._of_kind.get(kind, ())

    def is_strict(self, name: str) -> bool:
        """Whether a resource in force offers nothing while a pod holds an ID of it and it is unknown of which device."""
        return (resource := self.resources.get(name)) is not None and resource.spec.adopt == "strict"

    def is_by_plugin(self, name: str) -> bool:
        """Whether a resource in force is served by the device plugin API."""
        return (resource := self.resources.get(name)) is not None and resource.spec.serve == "device-plugin"

    def comes_before(self, name: str, other: str) -> bool:
        """Whether a resource, or a template, is before another in the configuration."""
        return self._order.get(name, 0) < self._order.get(other, 0)

    def kinds(self) -> list[str]:
        """The backends of all resources."""
        return list(self._of_kind)

    def names(self) -> list[str]:
        """Those in force, in the order of the config; of one template by name."""
        if not self._templates:
            return list(self.resources)
        return sorted(self.resources, key=lambda name: (self._order[name], name))

    def in_force(self) -> list[Resource[Any]]:
        """The same as resources."""
        return [self.resources[name] for name in self.names()]

    # --- templates ---

    def given(self) -> dict[str, tuple[str, ...]]:
        """The templates, each with the resources in force that it has given."""
        names: dict[str, list[str]] = {template.name: [] for template in self._templates}
        for resource in self.in_force():
            if resource.template:
                names[resource.template].append(resource.name)
        return {template: tuple(of_template) for template, of_template in names.items()}

    def giver(self, name: str) -> Resource[Any] | None:
        """The template that gives this name, if any does; validation sees to it that no two do."""
        return next((it for it in self._templates if name not in self.written and fits(it.name, name)), None)

    def kind_to_be(self, name: str) -> str | None:
        """The backend of the template that could give this name; None if any name of its domain were as like it.

        `nvidia.com/{model}` fits what another plugin serves, too: it has only those names that it has given.
        """
        giver = self.giver(name)
        return giver.spec.backend if giver and is_distinctive(giver.name) else None

    def bring(self, name: str, kind: str, value: str = "") -> bool:
        """Bring the resource into force that a template of this backend gives; returns whether this call did so.

        Args:
            name: of the resource.
            kind: the backend.
            value: what the name is made of; empty if it is unknown, as of a claim whose device is gone.
        """
        if name in self.written:
            return False
        if value:
            self.stands_for[name] = value
        if name in self.resources or (giver := self.giver(name)) is None or giver.spec.backend != kind:
            return False
        self._order[name] = self._order[giver.name]
        self.resources[name] = _given_by(giver, name)
        return True

    def let_go(self, name: str) -> None:
        """Have a resource that a template has given no more; a device or a claim may bring it again."""
        del self.resources[name], self._order[name]
        self.stands_for.pop(name, None)

    # --- devices ---

    def select(
        self, kind: str, device: Device, full: Mapping[str, str]
    ) -> tuple[tuple[Candidate, ...], tuple[str, ...], tuple[str, ...]]:
        """The resources that take a device of this backend, why the others do not, and those that have no room for it.

        Args:
            kind: the backend.
            device: what is to be taken.
            full: the resources whose lists are full, each with why; no IDs are made for them.
        """
        if device.unusable:
            return (), (device.unusable,), ()
        candidates, refused, without_room = [], [], []
        for resource in self._of_kind.get(kind, ()):
            name = resource.name
            if device.resource not in (None, name):
                continue  # made for another resource
            try:
                why = resource.refuses(device)
                if why is None and resource.spec.pre_start == "reset" and device.no_reset:
                    why = f"its pre_start is 'reset', and {device.no_reset}; 'check' works"
                if why is None:
                    named, value = (resource, "") if name in self.resources else self._named(resource, device)
                    if (why := full.get(named.name)) is not None:
                        without_room.append(named.name)
                    else:
                        ids = ask(lambda: backend_answers.ids(self._backends[kind].ids(named, device)))  # noqa: B023
                        candidates.append(Candidate(named.name, self._order[name], ids, value))
            except NamelessError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001  # one backend's nonsense must not stop the lists of all
                why = self.broken[name] = f"its IDs cannot be told: {shown(error)}"
            if why is not None:
                refused.append(f"{name} does not take it: {why}")
        return tuple(candidates), tuple(refused), tuple(without_room)

    def _named(self, template: Resource[Any], device: Device) -> tuple[Resource[Any], str]:
        """The resource that a template gives for this device, and the value of which its name is made.

        Raises:
            NamelessError: it cannot name it.
        """
        named = name_of(template.name, device.attributes)
        if named.name in self.written:
            raise NamelessError(f"its name would be {named.name}, which is a resource of its own")
        return self.resources.get(named.name) or _given_by(template, named.name), named.value


def _given_by(template: Resource[Any], name: str) -> Resource[Any]:
    return replace(template, name=name, template=template.name)
