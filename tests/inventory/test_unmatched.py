from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agent.inventory.shortfall import unmatched
from agent.inventory.survey import survey
from backends.base import Device, Problem, Resource, ResourceSpec, Selector
from tests.fakes import KIND, Fake, FakeOptions

A = "a.example/gpu"


def card(number: int, **attributes: str) -> Device:
    key = f"c{number}"
    return Device(key, key, frozenset({key}), attributes={name: (value,) for name, value in attributes.items()})


NODE = [
    card(0, vendor="10de", device="2330", driver="nvidia"),
    card(1, vendor="10de", device="2330", driver="vfio-pci"),
    card(2, vendor="1002", device="740f"),
]


def taking(*select: Selector, exclude: tuple[Selector, ...] = (), name: str = A) -> Resource[Any]:
    return Resource(name, ResourceSpec("gpu", FakeOptions(), select=select, exclude=exclude))


def said(*resources: Resource[Any], devices: list[Device] = NODE) -> list[str]:
    return [problem.sentence for _, problem in unmatched(resources, {"gpu": devices})]


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        ({"vendor": ("10dx",)}, "vendor = '10dx' matches nothing; the gpu backend found vendor 10de (2), 1002 (1)"),
        (
            {"vendor": ("100",)},
            "vendor = '100' matches nothing; the gpu backend found vendor 1002 (1), 10de (2)",  # the nearest is first
        ),
        (
            {"vendor": ("10de",), "device": ("740f", "2331")},
            (
                "vendor = '10de' and device = '740f' or '2331' matches nothing; "
                "the gpu backend found device 2330 (2) where vendor = '10de'"
            ),
        ),
        (
            {"driver": ("amdgpu",)},
            "driver = 'amdgpu' matches nothing; the gpu backend found driver nvidia (1), unknown (1), vfio-pci (1)",
        ),
        (
            {"vender": ("10de",)},
            (
                "vender = '10de' matches nothing; no device that the gpu backend found has an attribute 'vender' "
                "(did you mean 'vendor'?); they have device, driver, vendor"
            ),
        ),
        (
            {"colour": ("red",)},
            (
                "colour = 'red' matches nothing; no device that the gpu backend found has an attribute 'colour'; "
                "they have device, driver, vendor"
            ),
        ),
    ],
)
def test_it_says_what_is_there_instead(selector: Selector, sentence: str) -> None:
    assert said(taking(selector)) == [f"{A}: its selector {sentence}"]


@pytest.mark.parametrize(
    "resource",
    [
        taking(),
        taking({"vendor": ("10DE",)}),
        taking({"vendor": ("8086", "1002")}),
        taking({"vendor": ("1002",)}, exclude=({"vendor": ("8086",)},)),
    ],
)
def test_it_says_nothing_where_something_matches(resource: Resource[Any]) -> None:
    assert said(resource) == []


def test_each_selector_of_a_list_is_judged() -> None:
    sentences = said(taking({"vendor": ("10de",)}, {"vendor": ("8086",)}))
    assert [sentence.split(" matches")[0] for sentence in sentences] == [f"{A}: its selector vendor = '8086'"]


def test_an_exclude_may_match_nothing_but_its_attribute_must_exist() -> None:
    (sentence,) = said(taking(exclude=({"adress": ("0000:3b:00.0",)},)))
    assert sentence.startswith(f"{A}: its exclude adress = '0000:3b:00.0' matches nothing; no device")


def test_a_template_that_nearly_asks_for_an_attribute_is_told_which() -> None:
    (sentence,) = said(taking(name="a.example/{devise}"))
    assert sentence.startswith("a.example/{devise}: it names nothing; no device that the gpu backend found has an ")
    assert sentence.endswith("attribute 'devise' (did you mean 'device'?); they have device, driver, vendor")


def test_a_template_whose_hardware_may_come_is_no_mistake() -> None:
    assert said(taking(name="a.example/mig-{profile}"), taking(name="a.example/{device}")) == []


def test_without_devices_there_is_nothing_to_compare_with() -> None:
    assert said(taking({"vendor": ("10dx",)}), devices=[]) == []
    assert unmatched([taking({"vendor": ("10dx",)})], {}) == []


def test_devices_made_for_another_resource_do_not_count() -> None:
    theirs = [replace(card(0, path="/dev/a"), resource="b.example/x"), replace(card(1, path="/dev/b"), resource=A)]
    (sentence,) = said(taking({"path": ("/dev/a",)}), devices=theirs)
    assert sentence.endswith("the gpu backend found path /dev/b (1)")


def test_devices_without_attributes_are_said_to_have_none() -> None:
    assert said(taking({"vendor": ("10de",)}), devices=[card(0)])[0].endswith("; they have no attributes")


def test_many_values_are_not_all_written() -> None:
    (sentence,) = said(taking({"address": ("x",)}), devices=[card(n, address=f"0000:{n:02}:00.0") for n in range(20)])
    assert sentence.endswith("0000:07:00.0 (1) and 12 more")


async def test_a_survey_tells_it_of_backends_that_were_scanned() -> None:
    resource: Resource[Any] = Resource(A, ResourceSpec(KIND, FakeOptions(), select=({"vendor": ("10dx",)},)))
    backend = Fake(resource)
    backend.hardware = {device.unit: (device,) for device in NODE}
    (problem,) = (await survey([resource], {KIND: backend}, 5.0)).problems
    assert problem == (
        KIND,
        Problem(
            A, f"{A}: its selector vendor = '10dx' matches nothing; the fake backend found vendor 10de (2), 1002 (1)"
        ),
    )
