"""What the page and the probes make of names that are templates."""

from __future__ import annotations

from agent.console.http import sections
from agent.console.http.sections import troubles
from agent.console.views import Template
from tests.console.http.nodes import kvm, node

UNUSED = Template("nvidia.com/mig-{profile}", "gpu")
USED = Template("nvidia.com/{device}", "vfio", "", ("nvidia.com/1eb8",))


def test_a_template_has_a_row_as_long_as_it_has_given_no_name() -> None:
    shown = str(sections.resources((kvm(),), (UNUSED, USED)))
    assert "nvidia.com/mig-{profile}" in shown
    assert "no device gives it a name so far" in shown
    assert USED.name not in shown


def test_a_node_whose_only_resource_has_no_name_yet_has_a_configuration() -> None:
    assert "The configuration has no" not in str(sections.resources((), (UNUSED,)))


def test_a_template_without_a_name_is_no_failure_and_one_with_a_mistake_is_told() -> None:
    assert node(templates=(UNUSED,)).unready() == []
    assert troubles(node(templates=(UNUSED,)), []) == []
    wrong = Template("a.b/{devise}", "vfio", "it names nothing")
    (told,) = troubles(node(templates=(wrong,)), [])
    assert (told.state, told.title, told.sentences) == ("Degraded", "a.b/{devise}", ("it names nothing",))
