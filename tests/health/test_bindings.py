"""A latch ends when its hardware is bound anew, whoever looks, however late, and whichever backends a restart leaves."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.health import HealthBook, KeptHealth
from agent.health.causes import WINDOW
from agent.model import HEALTHY
from backends.base import Clears
from tests.health.said import BOOT, NOW, bound, record, signal

BACKENDS: Final = ("gpu", "infiniband", "vfio")
NEXT: Final = math.inf  # said while there was no driver: of the binding that is seen next
XID: Final = signal(NOW, "xid-79", clears_on=[Clears.REBIND, Clears.OPERATOR])

backends = st.sampled_from(BACKENDS)


class Machine(RuleBasedStateMachine):
    """One piece of hardware whose driver comes and goes, and backends that look at it, each in its own time."""

    def __init__(self) -> None:
        super().__init__()
        self.book = HealthBook(BOOT)
        self.now, self.sequence = 0.0, 0
        self.binding = 1  # 0: there is no driver
        self.bindings = 1  # so many drivers were bound since the boot
        self.configured = set(BACKENDS)
        self.seen: dict[str, int] = {}  # what each backend has told of it last
        self.looking: dict[str, int] = {}  # what it has read, and not told yet
        self.latched: float | None = None  # under which binding

    def find(self, backend: str, binding: int) -> None:
        self.now += 1.0
        self.book.found(backend, {"u": [bound(f"nvidia:{binding}" if binding else "", "h")]}, self.now)
        self.seen[backend] = binding
        if binding and self.latched == NEXT:
            self.latched = binding

    def was_seen(self) -> bool:
        """Whether a backend has seen how it is bound; and if it is not, none still believes that it is."""
        sure = bool(self.binding) or not (any(self.seen.values()) or self.looking)
        return sure and self.binding in self.seen.values()

    # --- what happens ---

    @rule()
    def a_driver_is_bound(self) -> None:
        self.bindings += 1
        self.binding = self.bindings

    @rule()
    def it_loses_its_driver(self) -> None:
        self.binding = 0

    @rule(backend=backends)
    def a_backend_begins_to_look(self, backend: str) -> None:
        if backend in self.configured:
            self.looking.setdefault(backend, self.binding)

    @rule(backend=backends)
    def it_tells_what_it_read(self, backend: str) -> None:
        if backend in self.looking:
            self.find(backend, self.looking.pop(backend))

    @precondition(was_seen)
    @rule()
    def the_kernel_logs_an_error(self) -> None:
        self.now += WINDOW + 1.0  # else it would flap
        self.sequence += 1
        self.book.recorded([XID], record(self.sequence), self.now)
        self.latched = self.binding or NEXT

    @rule(configured=st.sets(backends, min_size=1))
    def we_are_started_again_with_other_backends(self, configured: set[str]) -> None:
        kept = msgspec.json.decode(msgspec.json.encode(self.book.kept()), type=KeptHealth)
        self.book = HealthBook(BOOT)
        self.now += 1.0
        self.book.restore(kept, self.now, self.now)
        self.configured, self.seen, self.looking = set(configured), {}, {}

    @precondition(lambda self: len(self.configured) > 1 and len(set(self.seen.values())) == 1)
    @rule(data=st.data())
    def a_backend_leaves_while_all_agree(self, data: st.DataObject) -> None:
        backend = data.draw(st.sampled_from(sorted(self.configured)))
        self.now += 1.0
        self.book.found(backend, {"u": []}, self.now)
        self.configured.discard(backend)
        self.seen.pop(backend, None)
        self.looking.pop(backend, None)

    # --- the rules ---

    @invariant()
    def it_stays_until_a_driver_is_bound_anew(self) -> None:
        if self.latched is not None and self.bindings <= self.latched:
            assert self.book.of("h").reason == "xid-79"

    @rule()
    def once_all_have_looked_it_is_that_bindings_or_over(self) -> None:
        self.looking.clear()
        for backend in sorted(self.configured):
            self.find(backend, self.binding)
        if self.latched is None or self.latched < self.binding:
            assert self.book.of("h") is HEALTHY


TestBindings = Machine.TestCase
TestBindings.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
