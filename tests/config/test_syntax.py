"""What is no TOML is told in words, with its line and the likely mend."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.syntax import MOST, Mistake, parsed
from tests.docs.pages import text

HEAD = '[[resource]]\nname = "nvidia.com/gpu"\nbackend = "gpu"\n'
EXAMPLE = (Path(__file__).parents[2] / "config.example.toml").read_text()


def told(document: str) -> list[Mistake]:
    found = parsed(document)
    assert isinstance(found, list), "it is TOML"
    return found


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ('mode = "ro', 'mode = "ro"'),
        ('mode = ro"', 'mode = "ro"'),
        ("mode = ro", 'mode = "ro"'),
        ("mode = \"ro'", 'mode = "ro"'),
        ("mode = “ro”", 'mode = "ro"'),
        ("mode = ‘ro’", "mode = 'ro'"),
        ("mode = „ro“", 'mode = "ro"'),
        ("mode\u00a0= 1", "mode = 1"),
        ("\u200bmode = 1", "mode = 1"),
        ("root = /dev/kvm", 'root = "/dev/kvm"'),
        ("probe = 5s", 'probe = "5s"'),
        ("listen = 0.0.0.0:9440", 'listen = "0.0.0.0:9440"'),
        ("title = nvidia.com/gpu # all", 'title = "nvidia.com/gpu" # all'),
        ("owner = 0755", 'owner = "0755"'),
        ("count = 1,000", "count = 1000"),
        ("count = .5", "count = 0.5"),
        ("count = 5.", "count = 5.0"),
        ("shared = True", "shared = true"),
        ("shared = FALSE", "shared = false"),
        ("shared = yes", "shared = true"),
        ("shared = off", "shared = false"),
        ("mode: ro", 'mode = "ro"'),
        ('mode: "ro"', 'mode = "ro"'),
        ("mode ro", 'mode = "ro"'),
        ('mode == "ro"', 'mode = "ro"'),
        ('mode := "ro"', 'mode = "ro"'),
        ('mode = "ro",', 'mode = "ro"'),
        ('mode = "ro";', 'mode = "ro"'),
        ("mode =", 'mode = ""'),
        ('export mode = "ro"', 'mode = "ro"'),
        ('the mode = "ro"', '"the mode" = "ro"'),
        ("// a comment", "# a comment"),
        ("pattern = \"^tty\\d+$\"", "pattern = '^tty\\d+$'"),
        ('paths = ["/dev/a" "/dev/b"]', 'paths = ["/dev/a", "/dev/b"]'),
        ('paths = ["/dev/a",, "/dev/b"]', 'paths = ["/dev/a", "/dev/b"]'),
        ('paths = ["/dev/a, "/dev/b"]', 'paths = ["/dev/a", "/dev/b"]'),
        ("paths = [/dev/a, /dev/b]", 'paths = ["/dev/a", "/dev/b"]'),
        ('paths = ["/dev/a"', 'paths = ["/dev/a"]'),
        ('paths = [{ path = "/dev/a" ]', 'paths = [{ path = "/dev/a" }]'),
        ('paths = [{ path = "/dev/a", optional = True }]', 'paths = [{ path = "/dev/a", optional = true }]'),
        ('select = { model = "x", }', 'select = { model = "x" }'),
        ('select = { "model": "x" }', 'select = { model = "x" }'),
        ('select = { model = "x" vendor = "y" }', 'select = { model = "x", vendor = "y" }'),
        ('text = """abc', 'text = """abc"""'),
        ('a = "x" b = "y"', 'a = "x"  and below it  b = "y"'),
    ],
)  # fmt: skip
def test_one_slip_is_told_with_its_line_and_the_mend(line: str, mended: str) -> None:
    for after in ("", 'more = "x"\n[http]\nlisten = "off"\n'):
        if after and line == "mode =":
            continue
        (only,) = told(f"{HEAD}{line}\n{after}")
        assert only.line == 4
        assert only.sentence.partition("; write: ")[2] == mended


@pytest.mark.parametrize(
    ("document", "line", "words"),
    [
        (HEAD + "x = None\n", 4, "no word for nothing"),
        (HEAD + "x = null\n", 4, "leave the line out"),
        (HEAD + 'backend = "vfio"\n', 4, "the key backend is here twice, first in line 3"),
        ('[agent]\nprobe = "5s"\n[http]\n[agent]\n', 4, "the table [agent] is here twice, first in line 1"),
        (HEAD + '[resource]\nname = "b"\n', 4, "write: [[resource]]"),
        ('[[resource]\nname = "x"\n', 1, "write: [[resource]]"),
        ('[agent\nprobe = "5s"\n', 1, "write: [agent]"),
        ('[agent] probe = "5s"\n', 1, "write: [agent]  and below it"),
        (HEAD + 'paths = [\n  "/dev/a"\n  "/dev/b",\n]\n', 5, 'write: "/dev/a",'),
        (HEAD + 'paths = ["/dev/a"\n[http]\nlisten = "off"\n', 4, 'write: paths = ["/dev/a"]'),
        (HEAD + 'select = {\n  model = "x",\n}\n', 4, 'write: select = { model = "x" }'),
        (HEAD + "paths:\n  - /dev/a\n  - /dev/b\n", 4, 'write: paths = ["/dev/a", "/dev/b"]'),
        ("resources:\n  - name: nvidia.com/gpu\n    backend: gpu\n", 1, "this is YAML"),
        ('# mine\napiVersion: v1\nkind: ConfigMap\ndata:\n  config.yaml: |\n    a: b\n    c: d\n', 2, "`fairlead import FILE`"),
        ('configText: |\n  [[resource]]\n  name = "x"\n', 1, "values of a Helm chart"),
        ('{"resource": [{"name": "x"}]}', 1, "this is JSON"),
        ("<<<<<<< HEAD\n" + HEAD + "=======\n>>>>>>> other\n", 1, "a merge has left its marks"),
        ("```toml\n" + HEAD + "```\n", 1, "Markdown's"),
    ],
)  # fmt: skip
def test_other_mistakes_are_told_in_words_too(document: str, line: int, words: str) -> None:
    (only,) = told(document)
    assert only.line == line
    assert words in only.sentence


def test_several_mistakes_are_told_at_once_each_with_its_line() -> None:
    found = told('[[resource]]\nname = nvidia.com/gpu\nbackend = "gpu\na = 1 b = 2\nmig_devices = True\n')
    assert [it.line for it in found] == [2, 3, 4, 5]
    assert len(told("\n".join(f"a{n} = x" for n in range(100)))) == MOST


@given(st.integers(0, len(EXAMPLE) - 1), st.sampled_from(["", '"', "'", "[", "}", "=", ":", "“", "\n", "\u00a0", ","]))
def test_any_slip_in_the_example_is_told_with_a_line_of_the_file(at: int, mark: str) -> None:
    document = EXAMPLE[:at] + mark + EXAMPLE[at + 1 :]
    found = parsed(document)
    if isinstance(found, list):
        assert found
        assert all(it.line is None or 1 <= it.line <= document.count("\n") + 1 for it in found)
        assert all(it.sentence for it in found)
    else:
        assert found == tomllib.loads(document)


IN_A_CLUSTER = """\
apiVersion: v1
data:
  my.toml: |
    [[resource]]
    name = "nvidia.com/gpu"
    backend = "gpu"
kind: ConfigMap
metadata:
  name: fairlead
  namespace: fairlead
"""  # as `kubectl get configmap --output yaml` prints it


@pytest.mark.parametrize(
    ("document", "what"),
    [
        (IN_A_CLUSTER, "this is a ConfigMap"),
        (
            json.dumps({"kind": "ConfigMap", "apiVersion": "v1", "data": {"my.toml": "[[resource]]"}}),
            "this is a ConfigMap",
        ),
        ("apiVersion: v1\nitems:\n- " + IN_A_CLUSTER.replace("\n", "\n  ") + "\nkind: List\n", "this is a ConfigMap"),
        (
            text("deploy/helm/fairlead/templates/config-map.yaml").replace("config.toml", "my.toml"),
            "a Helm chart's template",
        ),
    ],
)
def test_a_config_map_is_told_what_it_is_and_how_its_toml_is_taken_out(document: str, what: str) -> None:
    (only,) = told(document)
    assert what in only.sentence
    assert re.search(r"kubectl create .*jsonpath='{\.data\.my\\.toml}' > config\.toml", only.sentence)


@pytest.mark.parametrize(
    "document",
    [
        '[http]\nlisten: "127.0.0.1:9440"\nhosts: []\n',
        '[[resource]]\nname = "a.b/c"\ntext = """\nkey: value\nother: value\nthird: value\n"""\nbroken\n',
        'name = "a.b/c"\nbackend: "gpu"\nreplicas: 2\nplacement: "spread"\n',
        '  [[resource]]\n  name: "a.b/c"\n  backend: "gpu"\n',
    ],
)
def test_toml_with_colons_is_not_called_yaml(document: str) -> None:
    assert "YAML" not in " ".join(it.sentence for it in told(document))
