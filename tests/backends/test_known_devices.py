from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.base import Device
from backends.interface.values import Known

HARDWARE = ["node:c:1:1", "node:c:1:2", "path:/dev/a", "pci:0"]


def device(unit: str, owns: set[str], depends: set[str] = frozenset()) -> Device:  # type: ignore[assignment]
    return Device(key=unit, unit=unit, hardware=frozenset(owns), depends=frozenset(depends))


def test_hardware_leads_to_the_units_that_own_it_or_depend_on_it() -> None:
    known = Known({"a": (device("a", {"x"}),), "b": (device("b", {"y"}, {"x"}),), "c": ()})
    assert known.minding("x") == ("a", "b")
    assert known.minding("y") == ("b",)
    assert known.minding("z") == ()
    assert list(known) == ["a", "b", "c"]
    assert known == {"a": known["a"], "b": known["b"], "c": ()}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.none() | st.lists(st.sets(st.sampled_from(HARDWARE)), max_size=2)),
        max_size=12,
    )
)
def test_the_way_from_hardware_to_units_follows_every_change(changes: list[tuple[str, list[set[str]] | None]]) -> None:
    known = Known()
    for unit, owned in changes:
        if owned is None:
            if unit in known:
                del known[unit]
        else:
            known[unit] = tuple(replace(device(unit, owns), identity=unit * (len(owns) > 1)) for owns in owned)
    for hardware in HARDWARE:
        minding = {unit for unit, devices in known.items() if any(hardware in d.hardware for d in devices)}
        assert sorted(known.minding(hardware)) == sorted(minding)
    same = {unit for unit, devices in known.items() if any(device.identity == device.key for device in devices)}
    assert known.same_by_key() == same == known.copy().same_by_key()
