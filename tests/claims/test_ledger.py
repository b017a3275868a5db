from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from agent.claims.ledger import MIN_AGE, REWRITE_AFTER, Ledger, Pods, Traced, Witnessed
from agent.model import FORGOTTEN, TWO_PODS, Held, ResourceClaim, SlotKey
from tests.fakes import KIND, device, held

A, B = "a.example/one", "b.example/two"
CARD = device("card")
X = held(A, "x", CARD)
NOBODY: set[SlotKey] = set()


def old_ledger(*claims: Held) -> Ledger:
    """Given at 0; ask at `MIN_AGE` or later to have them judged."""
    ledger = Ledger()
    ledger.allocate(claims or [X], 0.0)
    return ledger


def listed(
    ledger: Ledger, present: set[SlotKey], at: float = MIN_AGE, checkpoint: tuple[int, ...] | None = (1,)
) -> None:
    ledger.listed(present, at, at, checkpoint)


def test_a_claim_ends_when_a_list_and_then_a_newer_checkpoint_leave_it_out() -> None:
    ledger = old_ledger()
    listed(ledger, NOBODY)
    assert ledger.ending()
    assert ledger.checkpoint(NOBODY, (2,)) == [X]
    assert ledger.held() == []
    assert not ledger.ending()


BY_CLAIM = replace(held(A, "by-claim", device("gpu")), claim=ResourceClaim("uid-1", "team", "train", "pool", "gpu"))


def test_what_was_given_for_a_resource_claim_ends_when_that_is_unprepared_whatever_both_witnesses_lack() -> None:
    ledger = old_ledger(X, BY_CLAIM)
    listed(ledger, NOBODY)
    assert ledger.checkpoint(NOBODY, (2,)) == [X]
    assert known(ledger, {}, running=frozenset({"u"}), is_lost=True) == []
    assert ledger.held() == [BY_CLAIM]
    assert ledger.prepared("uid-1") == [BY_CLAIM]
    assert ledger.unprepared("uid-1") == [BY_CLAIM]
    assert not ledger.holds(*BY_CLAIM.hardware)
    assert ledger.unprepared("uid-1") == []


def test_a_checkpoint_without_a_prepared_claim_is_no_reason_to_look_for_pods_that_run() -> None:
    ledger = old_ledger(replace(BY_CLAIM, pods=frozenset({"u"})))
    assert not ledger.misses({})


def test_absence_from_lists_alone_ends_nothing() -> None:
    ledger = old_ledger()
    for n in range(9):
        listed(ledger, NOBODY, MIN_AGE + n)
    assert ledger.held() == [X]


def test_absence_from_checkpoints_alone_ends_nothing() -> None:
    ledger = old_ledger()
    assert [ledger.checkpoint(NOBODY, (n,)) for n in range(9)] == [[]] * 9


def test_the_checkpoint_that_lay_there_with_the_list_is_no_second_witness_however_often_it_is_read() -> None:
    ledger = old_ledger()
    listed(ledger, NOBODY, checkpoint=(1,))
    listed(ledger, NOBODY, MIN_AGE + 60, checkpoint=(1,))
    assert ledger.checkpoint(NOBODY, (1,)) == []
    assert ledger.held() == [X]


def test_where_no_checkpoint_lay_any_is_written_after() -> None:
    ledger = old_ledger()
    listed(ledger, NOBODY, checkpoint=None)
    assert ledger.checkpoint(NOBODY, (1,)) == [X]


def test_a_list_asked_for_before_the_claim_came_of_age_judges_nothing() -> None:
    ledger = old_ledger()
    ledger.listed(NOBODY, MIN_AGE - 0.001, MIN_AGE + 5, (1,))
    assert not ledger.ending()


def test_a_pod_that_a_list_shows_again_starts_anew() -> None:
    ledger = old_ledger()
    listed(ledger, NOBODY)
    listed(ledger, {X.slot}, MIN_AGE + 1)
    assert ledger.checkpoint(NOBODY, (2,)) == []
    assert ledger.held() == [X]


def test_a_long_init_container_absent_from_every_list_and_present_in_every_checkpoint_keeps_its_claim() -> None:
    ledger = old_ledger()
    for n in range(9):
        listed(ledger, NOBODY, MIN_AGE + n, checkpoint=(n,))
        assert ledger.checkpoint({X.slot}, (n + 1,)) == []
    assert ledger.held() == [X]


def test_another_allocate_of_a_claim_that_is_ending_starts_its_age_anew() -> None:
    ledger = old_ledger()
    listed(ledger, NOBODY)
    ledger.allocate([X], MIN_AGE + 1)
    assert not ledger.ending()
    assert ledger.checkpoint(NOBODY, (2,)) == []
    listed(ledger, NOBODY, 2 * MIN_AGE)
    assert not ledger.ending()
    listed(ledger, NOBODY, 2 * MIN_AGE + 1)
    assert ledger.ending()


def test_only_what_is_new_has_to_be_kept() -> None:
    ledger = Ledger()
    assert ledger.allocate([X], 0.0)
    assert not ledger.allocate([X], 1.0)
    assert ledger.allocate([held(A, "x", device("card", identity="2"))], 2.0)


def test_a_claim_that_begins_is_told_without_the_others_until_one_ends_or_changes() -> None:
    ledger = old_ledger(X)
    before = ledger.held_now()
    ledger.allocate([X, held(A, "y")], 1.0)
    now = ledger.held_now()
    assert now.begun_since(before) == [held(A, "y")]
    assert [len(before), len(now)] == [1, 2]
    ledger.allocate([held(A, "y", device("another"))], 2.0)
    assert ledger.held_now().begun_since(now) is None
    assert list(now) == [X, held(A, "y")]


def test_claims_are_told_in_the_order_in_which_they_began() -> None:
    ledger = old_ledger(X, held(A, "y"))
    ledger.allocate([X], 1.0)
    assert [claim.id for claim in ledger.held()] == ["x", "y"]


def test_the_lists_of_ending_claims_are_sent_again_if_no_checkpoint_comes() -> None:
    ledger = old_ledger(X, held(B, "y"))
    listed(ledger, {(B, "y")})
    assert ledger.awaiting_checkpoint(MIN_AGE + REWRITE_AFTER - 0.1) == set()
    assert ledger.awaiting_checkpoint(MIN_AGE + REWRITE_AFTER) == {A}


def test_it_says_when_the_youngest_claim_comes_of_age() -> None:
    ledger = old_ledger()
    assert Ledger().next_judgement(0.0) is None
    assert ledger.next_judgement(10.0) == MIN_AGE - 10.0
    ledger.allocate([held(A, "y")], 5.0)
    assert ledger.next_judgement(10.0) == MIN_AGE - 5.0
    assert ledger.next_judgement(MIN_AGE + 5.0) is None


def test_what_an_agent_before_us_kept_is_as_young_as_this_run_and_counts() -> None:
    ledger = old_ledger()
    z = held(A, "z")
    ledger.allocate([z], 0.0)
    other = held(A, "x", device("other"))
    ledger.restore([other, held(A, "y")], 100.0)
    assert ledger.held() == [other, z, held(A, "y")]
    listed(ledger, NOBODY, 100.0 + MIN_AGE - 1)
    assert ledger.checkpoint(NOBODY, (2,)) == [z]
    assert ledger.held() == [other, held(A, "y")]


def test_what_only_the_kubelet_remembers_is_adopted_and_gets_its_hardware_once_the_device_is_there() -> None:
    ledger = Ledger()
    bare = Held(A, "x", KIND)
    assert ledger.adopt({X.slot: KIND}, {}, 0.0) == [bare]
    assert ledger.adopt({X.slot: KIND}, {}, 1.0) == []
    assert ledger.adopt({X.slot: KIND}, {X.slot: CARD}, 2.0) == [X]
    assert ledger.adopt({X.slot: KIND}, {X.slot: device("other")}, 3.0) == []
    assert ledger.held() == [X]
    assert ledger.next_judgement(3.0) == MIN_AGE - 3.0  # since it was learnt, not since it was completed


def test_what_another_plugin_gave_to_a_later_pod_is_that_pods_and_what_we_give_is_known_by_its_id() -> None:
    ledger = Ledger()
    first, both, later = (frozenset(uids) for uids in ("a", "ab", "b"))
    one, two = frozenset(["one"]), frozenset(["two"])

    def adopt(pods: frozenset[str], hardware: frozenset[str], now: float) -> list[frozenset[str]]:
        return [it.hardware for it in ledger.adopt({X.slot: KIND}, {}, now, {X.slot: Traced(pods, hardware, hardware)})]

    assert adopt(first, one, 0.0) == [one]
    assert adopt(first, frozenset(), 1.0) == []  # its device is gone for a while
    assert ledger.holds("one")
    assert adopt(both, one | two, 2.0) == [one | two]  # the first has ended, and the kubelet's record has it yet
    assert adopt(later, two, 50.0) == [two]
    assert not ledger.holds("one")
    assert ledger.next_judgement(50.0) == MIN_AGE  # it is a claim of its own
    ledger.allocate([X], 60.0)
    assert adopt(first, one, 70.0) == []
    assert ledger.held() == [X]


def test_what_is_seen_later_of_what_another_plugin_gave_is_held_too_also_after_a_restart() -> None:
    pods, one, two = frozenset("a"), frozenset(["one"]), frozenset(["two"])
    ledger = Ledger()
    ledger.adopt({X.slot: KIND}, {}, 0.0, {X.slot: Traced(pods, one, one)})
    (kept,) = ledger.held()
    ledger = old_ledger(kept)
    assert ledger.is_bare(X.slot)
    assert [it.hardware for it in ledger.adopt({X.slot: KIND}, {}, 1.0, {X.slot: Traced(pods, two, two)})] == [
        one | two
    ]
    # all of it is there, and the first is another ID's of the same container
    assert [it.hardware for it in ledger.adopt({X.slot: KIND}, {}, 2.0, {X.slot: Traced(pods, two, one | two)})] == [
        two
    ]
    assert ledger.adopt({X.slot: KIND}, {}, 3.0, {X.slot: Traced(pods, two, one | two)}) == []
    assert ledger.adopt({X.slot: KIND}, {}, 3.0, {X.slot: Traced(pods)}) == []


def test_an_adopted_claim_keeps_the_backend_it_was_given_by() -> None:
    ledger = old_ledger(Held(A, "x", "another"))
    assert ledger.adopt({X.slot: KIND}, {X.slot: CARD}, 1.0)[0].backend == "another"


def test_hardware_is_held_while_any_claim_has_it() -> None:
    ledger = old_ledger(X, held(A, "y", CARD))
    listed(ledger, {(A, "y")})
    ledger.checkpoint({(A, "y")}, (2,))
    assert ledger.holds("card")
    assert not ledger.holds("another card")


# --- a kubelet that forgets ---

POD, LATER = frozenset({"pod"}), frozenset({"later"})


def known(ledger: Ledger, record: Mapping[SlotKey, Pods], *seen: Any, **more: Any) -> list[Held]:
    """Hold the claims against a record in which each pod has one container."""
    containers = {slot: dict.fromkeys(pods, ("c",)) for slot, pods in record.items()}
    return ledger.known(Witnessed(containers, *seen, **more))


def doubts(ledger: Ledger) -> list[str]:
    return [claim.trouble for claim in ledger.held()]


def test_what_a_kubelet_lost_from_its_record_does_not_end_and_is_known_again_with_the_record() -> None:
    ledger = old_ledger()
    assert known(ledger, {X.slot: POD}) == []
    assert [it.trouble for it in known(ledger, {}, is_lost=True)] == [FORGOTTEN]
    assert known(ledger, {}) == []
    listed(ledger, NOBODY)
    assert (ledger.ending(), ledger.checkpoint(NOBODY, (2,))) == (False, [])
    assert [it.trouble for it in known(ledger, {}, {X.slot: POD})] == [""]
    known(ledger, {}, is_lost=True)
    known(ledger, {X.slot: POD})
    assert doubts(ledger) == [""]


def test_what_an_intact_record_lacks_has_ended_and_is_not_lost_with_the_record() -> None:
    ledger = old_ledger()
    known(ledger, {X.slot: POD})
    known(ledger, {})
    listed(ledger, NOBODY)
    assert known(ledger, {}, is_lost=True) == []
    assert ledger.checkpoint(NOBODY, (2,)) == [X]


def test_what_a_pod_had_before_a_reboot_is_not_lost_since_nothing_of_it_runs() -> None:
    ledger = Ledger()
    kept = msgspec.structs.replace(X, pods=POD, trouble=FORGOTTEN)
    assert ledger.restore([kept], 0.0) == [kept]
    assert ledger.restore([kept], 0.0, rebooted=True) == [msgspec.structs.replace(X, rebooted=True)]
    assert known(ledger, {}, running=LATER, is_lost=True) == []


def test_a_pod_that_was_seen_to_run_has_what_it_has_until_it_is_seen_no_more() -> None:
    ledger = old_ledger()
    known(ledger, {X.slot: POD}, running=POD | LATER)
    assert [claim.pods for claim in ledger.held()] == [POD]
    known(ledger, {}, running=POD)
    assert doubts(ledger) == [FORGOTTEN], "whether anybody says that the record is lost or not"
    assert ledger.believe(frozenset({"card"})) != []
    known(ledger, {}, running=POD)
    assert doubts(ledger) == [FORGOTTEN], "what is seen counts more than an operator's word"
    known(ledger, {}, running=None, is_lost=True)
    assert doubts(ledger) == [FORGOTTEN]
    known(ledger, {}, running=LATER)
    assert doubts(ledger) == [""]
    listed(ledger, NOBODY)
    assert [it.id for it in ledger.checkpoint(NOBODY, (2,))] == ["x"]


def test_what_a_container_had_before_it_was_given_others_is_not_forgotten() -> None:
    """A kubelet that has dropped a pod and then admits it anew asks for others, while its cgroup is there all along."""
    ledger = old_ledger(X, held(A, "y", CARD))
    known(ledger, {X.slot: POD, (A, "y"): POD}, running=POD)
    given = {("pod", "c", A): ("y",)}
    known(ledger, {(A, "y"): POD}, running=POD, served=given)
    assert doubts(ledger) == [FORGOTTEN, ""], "what it has now may be from before: a record may be an older one"
    ledger.allocate([held(A, "y", CARD)], 1.0)
    known(ledger, {(A, "y"): POD}, running=POD, served=given, is_sure=False)
    assert doubts(ledger) == [FORGOTTEN, ""]
    known(ledger, {(A, "y"): POD}, running=POD, served={("pod", "another", A): ("y",)})
    assert doubts(ledger) == [FORGOTTEN, ""], "another container has those"
    known(ledger, {(A, "y"): POD}, running=POD, served=given)
    assert [(claim.trouble, claim.pods) for claim in ledger.held()] == [("", frozenset()), ("", POD)]
    listed(ledger, {(A, "y")})
    assert ledger.checkpoint({(A, "y")}, (2,)) == [X]


def test_a_pod_that_a_record_named_and_that_has_ended_has_nothing_after_a_restart_and_a_lost_record() -> None:
    """Else its device is withheld from every pod until an operator says that none has it."""
    ledger = old_ledger()
    known(ledger, {X.slot: POD}, running=LATER)
    again = Ledger()
    again.restore(ledger.held(), 0.0)
    known(again, {}, running=LATER, is_lost=True)
    assert doubts(again) == [""]
    known(again, {}, running=POD, is_lost=True)
    assert doubts(again) == [FORGOTTEN], "it starts"


def test_an_operator_says_that_no_pod_has_what_the_kubelet_has_forgotten() -> None:
    ledger = old_ledger()
    known(ledger, {}, is_lost=True)
    assert ledger.believe(frozenset({"another"})) == []
    assert ledger.believe(frozenset({"card"})) == [X]
    known(ledger, {})
    listed(ledger, NOBODY)
    assert ledger.checkpoint(NOBODY, (2,)) == [X]


@pytest.mark.parametrize(
    ("record", "shown", "running"),
    [(POD | LATER, NOBODY, None), (POD, {"a/one", "a/two"}, None), (LATER, NOBODY, POD | LATER)],
    ids=["checkpoint", "List", "one of them forgotten"],
)
def test_two_pods_with_one_device_are_found_and_their_resource_is_sent_again(
    record: frozenset[str], shown: set[str], running: frozenset[str] | None
) -> None:
    ledger = old_ledger()
    known(ledger, {X.slot: POD}, running=running)
    known(ledger, {X.slot: record}, {X.slot: frozenset(shown)}, running)
    assert doubts(ledger) == [TWO_PODS]
    assert ledger.awaiting_checkpoint(0.0) == {A}  # so that the kubelet's checkpoint shows the end of one
    assert ledger.ending()
    known(ledger, {X.slot: LATER}, running=running and LATER)
    assert doubts(ledger) == [""]


SLOTS = [(A, "x"), (A, "y"), (B, "x")]


class ComingAndGoing(RuleBasedStateMachine):
    """Pods come and go; a kubelet shows them as the contract says: Lists without init containers, stale checkpoints.

    It may lose its record (A11.1): then it knows none of the pods that run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: set[SlotKey] = set()  # what containers hold and the kubelet does not know
        self.is_seen = False  # whether the cgroups of pods are to be seen
        self.never_seen: set[SlotKey] = set()  # what was claimed of pods unseen as the record was lost
        self.ledger = Ledger()
        self.now = 0.0
        self.pods: dict[SlotKey, bool] = {}  # what containers really hold → in an init container
        self.allocated: dict[SlotKey, float] = {}
        self.written: set[SlotKey] = set()
        self.version = 0
        self.absent: dict[SlotKey, int] = {}  # left out of a List while old enough → the checkpoint's version then
        self.kept = self.ledger.held_now()  # at the step before

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @initialize(is_seen=st.booleans())
    def see(self, is_seen: bool) -> None:
        self.is_seen = is_seen

    @rule(slot=st.sampled_from(SLOTS), init=st.booleans())
    def allocate(self, slot: SlotKey, init: bool) -> None:
        if slot in self.ledger.forgotten():
            return  # it is Unhealthy
        self.ledger.allocate([held(*slot, device("-".join(slot)))], self.now)
        self.pods[slot] = init
        self.allocated[slot] = self.now
        self.absent.pop(slot, None)
        self.write()  # the kubelet writes after each Allocate
        self.compare()

    @rule()
    def lose_the_record(self) -> None:
        self.compare()  # of what was given a moment ago and never looked at, nobody knows that a pod has it
        self.never_seen |= {
            claim.slot for claim in self.ledger.held() if not claim.pods
        }  # nor is the end of those seen
        self.forgotten = set(self.pods)
        self.written, self.version = set(), self.version + 1
        self.compare(is_lost=True)

    def compare(self, *, is_lost: bool = False) -> None:
        """Hold the claims against the record, as is done before each list and with each answer."""
        running = frozenset(map(str, self.pods)) if self.is_seen else None
        record = {slot: frozenset({str(slot)}) for slot in self.written}
        known(self.ledger, record, running=running, is_lost=is_lost)
        for slot in self.ledger.forgotten():
            self.absent.pop(slot, None)

    @rule(slot=st.sampled_from(SLOTS), card=st.sampled_from(["card", "another card"]))
    def start_again(self, slot: SlotKey, card: str) -> None:
        """What was kept of the claim says as well what was seen of its pods; an agent before us knew other hardware of it."""
        if slot in self.pods and (known := self.ledger.of(slot)) is not None:
            kept = replace(held(*slot, device(card)), pods=known.pods, trouble=known.trouble)
            self.ledger.restore([kept], self.allocated[slot])
            self.absent.pop(slot, None)

    @rule(slot=st.sampled_from(SLOTS))
    def end(self, slot: SlotKey) -> None:
        self.pods.pop(slot, None)
        self.forgotten.discard(slot)

    @rule()
    def write(self) -> None:
        self.written = self.pods.keys() - self.forgotten
        self.version += 1

    def shown(self) -> set[SlotKey]:
        return {slot for slot, init in self.pods.items() if not init and slot not in self.forgotten}

    @rule(took=st.sampled_from([0.0, 2.0]))
    def ask_the_list(self, took: float) -> None:
        self.compare()
        present, asked = self.shown(), self.now
        self.now += took
        self.ledger.listed(present, asked, self.now, (self.version,))
        for slot in SLOTS:
            if slot in present:
                self.absent.pop(slot, None)
            elif slot in self.judged() and asked - self.allocated[slot] >= MIN_AGE:
                self.absent.setdefault(slot, self.version)

    def judged(self) -> set[SlotKey]:
        """What may end."""
        return self.allocated.keys() - self.ledger.forgotten()

    @rule()
    def ask_the_list_of_a_kubelet_that_just_started(self) -> None:
        self.ledger.listed(set(), self.now, self.now, (self.version,))
        for slot in self.judged():
            if self.now - self.allocated[slot] >= MIN_AGE:
                self.absent.setdefault(slot, self.version)

    @rule()
    def read_the_checkpoint(self) -> None:
        self.compare()
        for claim in self.ledger.checkpoint(self.written, (self.version,)):
            assert claim.slot not in self.pods, "nothing that a container holds ends"
            assert self.absent.pop(claim.slot) < self.version, "both witnesses, the second after the first"
            assert self.now - self.allocated.pop(claim.slot) >= MIN_AGE
        for slot in self.written:
            if self.absent.get(slot, self.version) < self.version:
                del self.absent[slot]

    @invariant()
    def whatever_a_container_holds_is_claimed(self) -> None:
        assert self.pods.keys() <= {claim.slot for claim in self.ledger.held()}

    @invariant()
    def what_is_told_as_new_completes_what_was_held_before(self) -> None:
        now = self.ledger.held_now()
        assert list(now) == self.ledger.held()
        if (begun := now.begun_since(self.kept)) is not None:
            assert [*self.kept, *begun] == [*now]
        self.kept = now

    @invariant()
    def it_waits_for_a_second_witness_exactly_where_the_first_has_spoken(self) -> None:
        assert self.ledger.ending() == bool(self.absent)

    def teardown(self) -> None:
        """Once both witnesses tell the truth, only what is held is claimed."""
        self.now += MIN_AGE
        for slot in set(self.forgotten):
            self.end(slot)
        self.compare()
        assert not self.is_seen or self.never_seen.issuperset(self.ledger.forgotten()), (
            "the ends of the others were seen"
        )
        self.ledger.believe(frozenset().union(*(claim.hardware for claim in self.ledger.held())))
        for _ in range(2):  # the first checkpoint may answer an older question
            self.write()
            self.ask_the_list(0.0)
            self.write()
            self.read_the_checkpoint()
        assert self.pods.keys() == {claim.slot for claim in self.ledger.held()}


ComingAndGoing.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
test_whatever_pods_and_witnesses_do = ComingAndGoing.TestCase


@pytest.mark.parametrize("ran", [POD | LATER, LATER], ids=["seen to run", "never seen to run"])
def test_what_a_pod_had_that_ended_before_the_kubelet_began_with_an_empty_record_is_not_forgotten(
    ran: frozenset[str],
) -> None:
    ledger = old_ledger()
    known(ledger, {X.slot: POD}, running=ran)
    known(ledger, {X.slot: POD}, running=LATER)
    assert known(ledger, {}, running=LATER, is_lost=True) == []
    assert doubts(ledger) == [""]
