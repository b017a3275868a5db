from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config import AgentConfig, Config, ConfigError, ConfigProblem, load
from agent.config.file import HttpConfig, KubernetesConfig
from agent.config.typed import Listen, PathOrNone, PathOrOff
from agent.runtime.errors import ExitCode
from backends.base import Host, Resource, ResourceSpec, Seconds
from tests.config.fakes import CharDevOptions, FakeRegistry, PathOption, StubOptions

Load = Callable[[str], Config]
Told = Callable[[str], list[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


@pytest.fixture
def load_text(file: Path) -> Load:
    def load_text(text: str) -> Config:
        file.write_text(text)
        return load(file, FakeRegistry())

    return load_text


@pytest.fixture
def told(load_text: Load, file: Path) -> Told:
    """Every problem with a text, as a person reads it after the file's name."""

    def told(text: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load_text(text)
        assert error.value.exit_code is ExitCode.USAGE
        return [line.removeprefix(f"{file}:") for line in error.value.sentence.splitlines()]

    return told


def test_every_key_reaches_its_value(load_text: Load, file: Path) -> None:
    config = load_text("""
        [agent]
        plugin_dir = "/p"
        kubelet_root = "/k"
        state_dir = "/s"
        admin_socket = "/a"
        uevents = "udev"
        resync = "1h30m"
        probe = "250ms"
        nfd_features = "/f"
        [host]
        root = "/host"
        sys = "/host/sys"
        dev = "/d"
        proc = "/pr"
        run = "/r"
        [http]
        listen = "[::1]:9440"
        [kubernetes]
        events = true
        condition = true
        drain_annotation = true
        kubeconfig = "/etc/kubernetes/kubelet.conf"
        [[resource]]
        name = "a.b/kvm"
        backend = "chardev"
        paths = [{ path = "/dev/kvm", permissions = "rw" }]
        [resource.options]
        count = 3
        [[resource]]
        name = "a.b/widget"
        backend = "stub"
        select = { vendor = "10de", class = ["0300", 302] }
        exclude = [{ address = "0000:3b:00.0" }, { numa_node = 1 }]
        replicas = 4
        placement = "pack"
        pre_start = "check"
    """)
    assert replace(config, read_at=0.0) == Config(
        agent=AgentConfig(
            Path("/p"),
            Path("/k"),
            Path("/s"),
            Path("/a"),
            "udev",
            Seconds(5400),
            Seconds(0.25),
            nfd_features=PathOrOff("/f"),
        ),
        host=Host(Path("/host"), Path("/host/sys"), Path("/d"), Path("/pr"), Path("/r")),
        http=HttpConfig(Listen("[::1]:9440")),
        resources=(
            Resource("a.b/kvm", ResourceSpec("chardev", CharDevOptions([PathOption("/dev/kvm", "rw")], 3))),
            Resource(
                "a.b/widget",
                ResourceSpec(
                    "stub",
                    StubOptions(),
                    ({"vendor": ("10de",), "class": ("0300", "302")},),
                    ({"address": ("0000:3b:00.0",)}, {"numa_node": ("1",)}),
                    4,
                    "pack",
                    "check",
                ),
            ),
        ),
        source=file,
        kubernetes=KubernetesConfig(True, True, True, PathOrNone("/etc/kubernetes/kubelet.conf")),
    )


def test_where_pods_are_placed_and_what_is_done_before_they_start_are_read(load_text: Load) -> None:
    default, *others = load_text(
        _ODD
        + _ODD.replace("a.b/odd", "a.b/pack") + 'placement = "pack"\npre_start = "check"\nreplicas = 3\nedits = "cdi"\nadopt = "strict"\n'
        + _ODD.replace("a.b/odd", "a.b/reset") + 'placement = "spread"\npre_start = "reset"\n'
    ).resources  # fmt: skip
    assert (default.spec.placement, default.spec.pre_start) == ("spread", "none")
    assert [(it.spec.placement, it.spec.pre_start) for it in others] == [("pack", "check"), ("spread", "reset")]
    assert [it.spec.edits for it in (default, *others)] == ["inline", "cdi", "inline"]
    assert [it.spec.adopt for it in (default, *others)] == ["lenient", "strict", "lenient"]


def test_a_resource_says_by_which_api_pods_get_it(load_text: Load) -> None:
    config = load_text(
        _ODD + _ODD.replace("a.b/odd", "a.b/claimed") + 'serve = "dra"\n[dra]\nno_execute = ["a.b/claimed"]\n'
    )
    assert [it.spec.serve for it in config.resources] == ["device-plugin", "dra"]
    assert config.uses_dra
    assert config.dra.no_execute == ("a.b/claimed",)
    assert not load_text(_ODD).uses_dra


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ('driver = "Fairlead"', "dra.driver: 'Fairlead' is no driver's name"),
        (f'driver = "{"a" * 64}"', "is no driver's name: at most 63"),
        ('no_execute = ["a.b/odd"]', "dra.no_execute[0]: there is no resource with serve = 'dra' 'a.b/odd'"),
        ("no_execute_most = 0", "dra.no_execute_most: "),
    ],
)
def test_what_would_serve_nobody_or_evict_nobody_is_a_mistake(load_text: Load, written: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_text(f"{_ODD}[dra]\n{written}\n")
    assert sentence in str(raised.value)


def test_an_empty_file_means_the_defaults_and_no_resources(load_text: Load, file: Path) -> None:
    assert replace(load_text(""), read_at=0.0) == Config(source=file, is_empty=True)


def test_every_mistake_is_told_at_once_with_its_line(told: Told) -> None:
    assert told("""\
[agent]
plugin_dir = "relative"
resinc = "5m"
probe = 30
uevents = "kernl"
[host]
sys = ["/sys"]
[htpp]
listen = "off"
[[resource]]
name = "gpu"
backend = "chardv"
replicas = 0
[[resource]]
name = "a.b/kvm"
backend = "chardev"
count = "many"
paths = [
  { path = 1 },
  { permission = "rw" },
]
select = 7
pathss = 1
[[resource]]
[kubernetes]
events = "on"
kubeconfig = "kubelet.conf"
""") == [
        "2: agent.plugin_dir: 'relative' is no absolute path; it starts with '/'",
        "3: agent.resinc: there is no key 'resinc'; did you mean 'resync'?",
        "4: agent.probe: expected a duration such as '5s', got 30; write: \"30s\"",
        "5: agent.uevents: there is no choice 'kernl'; did you mean 'kernel'?",
        "7: host.sys: expected a path, got ['/sys']; write: \"/sys\"",
        "8: htpp: there is no table 'htpp'; did you mean 'http'?",
        "11: resource[0].name: 'gpu' must have exactly one '/', as in 'example.com/widget'",
        "12: resource[0].backend: there is no backend 'chardv'; did you mean 'chardev'?",
        "13: resource[0].replicas: expected a whole number >= 1",
        "17: resource[1].count: expected a whole number, got a string",
        '19: resource[1].paths[0].path: expected a string, got a whole number; write: "1"',
        "20: resource[1].paths[1].permission: there is no key 'permission'; did you mean 'permissions'?",
        "20: resource[1].paths[1]: the key 'path' is missing",
        "22: resource[1].select: expected a table of attributes, as in { vendor = '10de' }",
        "23: resource[1].pathss: there is no key 'pathss'; did you mean 'paths'?",
        "24: resource[2]: the key 'name' is missing: the resource that pods ask for, as in 'example.com/widget'",
        "24: resource[2]: the key 'backend' is missing: one of chardev, stub, odd, failing, broken",
        "26: kubernetes.events: expected true or false, got a string; write: true",
        "27: kubernetes.kubeconfig: 'kubelet.conf' is no absolute path; it starts with '/'",
    ]


def test_a_name_with_nothing_near_it_is_answered_with_all_there_are(told: Told) -> None:
    assert told("[http]\nzzz = 1\n") == ["2: http.zzz: there is no key 'zzz'; there are 'hosts', 'listen'"]


_KVM = '[[resource]]\nname = "a.b/kvm"\nbackend = "chardev"\npaths = [{ path = "/dev/kvm" }]\n'
_ODD = '[[resource]]\nname = "a.b/odd"\nbackend = "odd"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            _KVM + _KVM,
            "6: resource[1].name: resource[0] (line 1) has the name 'a.b/kvm' already; give one of them another",
        ),
        (
            _KVM.replace("kvm", "{path}", 1) + _KVM.replace("kvm", "{path}-x", 1),
            "6: resource[1].name: 'a.b/{path}-x' could give the same name as 'a.b/{path}' of resource[0] (line 1): begin or end one of them otherwise",
        ),
        (
            _KVM.replace("kvm", "{path", 1),
            "2: resource[0].name: 'a.b/{path' must have braces only around the name of an attribute, as in 'nvidia.com/mig-{profile}'",
        ),
        (
            _KVM + "count = 1\n[resource.options]\ncount = 2\n",
            "5: resource[0].count: is also in [resource.options]; keep one of them",
        ),
        (
            _KVM + "[resource.options]\ncuont = 2\n",
            "6: resource[0].options.cuont: there is no key 'cuont'; did you mean 'count'?",
        ),
        (_KVM + "options = 1\n", "5: resource[0].options: expected a table, got a whole number"),
        (_KVM + "select = []\n", "5: resource[0].select: an empty list selects nothing; leave the key out"),
        (_KVM + "exclude = {}\n", "5: resource[0].exclude: expected a table of attributes, as in { vendor = '10de' }"),
        (
            _KVM + "select = [{ a = 1 },\n { a = 1.5 }]\n",
            "6: resource[0].select[1].a: expected a string or a list of strings; put the value in quotes",
        ),
        (
            _KVM + "exclude = { a = [] }\n",
            "5: resource[0].exclude.a: an empty list matches nothing; leave the attribute out",
        ),
        (_KVM.replace('"/dev/kvm"', '"/tmp/kvm"'), "4: resource[0].paths[0].path: lies outside /dev"),
        (
            _KVM.replace('{ path = "/dev/kvm" }', '"/dev/kvm"'),
            "4: resource[0].paths[0]: expected a table, as in { path = '/dev/kvm' }",
        ),
        (
            '[[resource]]\nname = "a.b/c"\nbackend = "chardev"\n[resource.options]\npaths = [\n{ path = "x" }]\n',
            "6: resource[0].options.paths[0].path: lies outside /dev",
        ),
        (_KVM + "replicas = true\n", "5: resource[0].replicas: expected a whole number, got true or false"),
        (
            _KVM + 'placement = "sprad"\n',
            "5: resource[0].placement: there is no choice 'sprad'; did you mean 'spread'?",
        ),
        (_KVM + "pre_start = 1\n", "5: resource[0].pre_start: expected a string, got a whole number"),
        (
            _KVM + 'pre_start = "reset"\n',
            "5: resource[0].pre_start: the backend 'chardev' cannot reset its hardware; 'check' works",
        ),
        (
            _ODD + 'pre_start = "reset"\nreplicas = 2\n',
            "4: resource[0].pre_start: 'reset' would reset hardware under the other pods that share it; use 'check'",
        ),
        (
            '[[resource]]\nname = "a.b/c"\nbackend = "broken"\nx = 1\n',
            "3: resource[0].backend: backend 'broken' cannot be imported: no libbroken.so",
        ),
        (
            '[[resource]]\nname = "a.b/c"\nbackend = "failing"\n',
            "3: resource[0].backend: the backend 'failing' failed to check this resource: RuntimeError('oh no')",
        ),
        (
            '[resource]\nname = "a.b/c"\n',
            "1: resource: a resource is a table of its own: write [[resource]] above its keys",
        ),
        ("agent = 5\n", "1: agent: expected a table, got a whole number"),
        ('[http]\nlisten = "9440"\n', "2: http.listen: '9440' is no address; write 'host:port', 'unix:/path' or 'off'"),
        (
            f'[agent]\nplugin_dir = "/{"d" * 75}"\n',
            "2: agent.plugin_dir: is too long: a socket in it would have a path of 108 bytes, and 107 is the most",
        ),
        ("a = 1\nb = \n", ' this is no TOML: the key has no value; write: b = ""'),
        ('a = "', ' this is no TOML: the quote at the end is missing; write: a = ""'),
        ("a = 1\na = 2\n", " this is no TOML: the key a is here twice, first in line 1; keep one"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_what_to_do(told: Told, text: str, problem: str) -> None:
    line, separator, sentence = problem.partition(" this is no TOML")
    found = told(text)
    assert len(found) == 1
    assert found[0].endswith(separator + sentence) if separator else found[0] == line


@pytest.mark.parametrize(
    ("text", "line"), [("a = 1\nb = \n", 2), ("\n\na = '''\nx = 1", 3), ("\n[a\n", 2), ("[a]\n[a]\n", 2)]
)
def test_a_syntax_error_is_told_with_its_line(load_text: Load, text: str, line: int) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(text)
    assert [problem.line for problem in error.value.problems] == [line]


def test_a_fixed_count_that_cannot_pass_the_kubelet_is_refused(load_text: Load, told: Told) -> None:
    fitting = 149_000
    assert load_text(f"{_KVM}count = {fitting}\n").resources
    (problem,) = told(f"{_KVM}count = 1_000_000_000_000\n")
    assert problem.startswith("1: resource[0]: its list of devices would pass the 4 MiB that a kubelet receives")


def test_a_problem_in_one_resource_does_not_hide_anothers_check(told: Told) -> None:
    assert told(_KVM.replace("a.b/kvm", "kvm").replace("/dev/kvm", "/x")) == [
        "2: resource[0].name: 'kvm' must have exactly one '/', as in 'example.com/widget'",
        "4: resource[0].paths[0].path: lies outside /dev",
    ]


def test_options_of_every_shape_are_read(load_text: Load) -> None:
    (resource,) = load_text("""
        [[resource]]
        name = "a.b/odd"
        backend = "odd"
        parts = [{ part-name = "x", sizes = [1, 2] }]
        limits = { a = 1 }
        ratio = 2
        [resource.options]
        name = "the backend's own"
        mode = "slow"
    """).resources
    options = resource.spec.options
    assert (options.name, options.mode.value, options.ratio, options.limits) == (
        "the backend's own",
        "slow",
        2.0,
        {"a": 1},
    )
    assert [(part.part_name, part.sizes) for part in options.parts] == [("x", (1, 2))]


def test_mistakes_in_options_of_every_shape_are_all_told(told: Told) -> None:
    assert told("""\
[[resource]]
name = "a.b/odd"
backend = "odd"
mode = "fats"
ratio = 1979-05-27
limits = { a = "x" }
parts = [
  { part_name = "x" },
  { part-name = "x", sizes = [1, "2", 3.5] },
]
""") == [
        "4: resource[0].mode: there is no choice 'fats'; did you mean 'fast'?",
        "5: resource[0].ratio: expected a number, got a date",
        "6: resource[0].limits: expected a whole number, got a string",
        "8: resource[0].parts[0].part_name: there is no key 'part_name'; did you mean 'part-name'?",
        "8: resource[0].parts[0]: the key 'part-name' is missing",
        "9: resource[0].parts[1].sizes[1]: expected a whole number, got a string; write: 2",
        "9: resource[0].parts[1].sizes[2]: expected a whole number, got a number",
    ]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('backend = "chardev"\npaths = "/dev/kvm"', '[{ path = "/dev/kvm" }]'),
        ('backend = "chardev"\npaths = { path = "/dev/kvm" }', '[{ path = "/dev/kvm" }]'),
        ('backend = "chardev"\ncount = ["5"]\npaths = [{ path = "/dev/kvm" }]', "5"),
        ('backend = "chardev"\nusb = [{ vendor = "0403", product = "6001", serial = 165 }]', '"165"'),
        ('backend = "infiniband"\nports = 1', "[1]"),
        ('backend = "gpu"\nplacement = ["spread"]', '"spread"'),
        ('backend = "gpu"\n[agent]\nprobe = 5', '"5s"'),
        ('backend = "gpu"\n[http]\nhosts = "node-1"', '["node-1"]'),
    ],
)
def test_a_value_of_another_kind_is_answered_with_the_line_that_is_right(line: str, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[[resource]]\nname = "a.b/c"\n{line}\n')
    with pytest.raises(ConfigError) as error:
        load(file)
    assert [it.sentence.partition("; write: ")[2] for it in error.value.problems] == [meant]


def test_a_condition_on_a_whole_list_is_told(told: Told) -> None:
    part = '{ part-name = "x" }'
    assert told(f'[[resource]]\nname = "a.b/c"\nbackend = "odd"\nparts = [{part}, {part}, {part}]\n') == [
        "4: resource[0].parts: expected a list of length <= 2"
    ]


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "none.toml", FakeRegistry())
    assert error.value.problems == (
        ConfigProblem(tmp_path / "none.toml", None, "", "the file cannot be read: No such file or directory"),
    )
    assert str(error.value) == f"{tmp_path}/none.toml: the file cannot be read: No such file or directory"


def test_a_directory_is_no_configuration_even_as_the_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(None, FakeRegistry(), default=tmp_path)


def test_a_file_that_is_not_utf_8_is_told_with_its_line(file: Path) -> None:
    file.write_bytes(b"# one\n# \xff\n")
    with pytest.raises(ConfigError) as error:
        load(file, FakeRegistry())
    assert error.value.problems[0].line == 2


def test_a_byte_order_mark_does_no_harm(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf[agent]\n")
    assert replace(load(file, FakeRegistry()), read_at=0.0) == Config(source=file)


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000])
def test_absurd_values_are_a_problem_and_no_crash(told: Told, value: str) -> None:
    assert len(told(f"a = {value}\n")) == 1


def test_without_a_file_kubevirts_devices_are_offered(tmp_path: Path) -> None:
    config = load(None, FakeRegistry(), default=tmp_path / "none.toml")
    assert config.source is None
    assert [(r.name, r.spec.options.paths[0].path, r.spec.options.count) for r in config.resources] == [
        ("devices.kubevirt.io/kvm", "/dev/kvm", 1000),
        ("devices.kubevirt.io/tun", "/dev/net/tun", 1000),
        ("devices.kubevirt.io/vhost-net", "/dev/vhost-net", 1000),
        ("devices.kubevirt.io/vhost-vsock", "/dev/vhost-vsock", 1000),
        ("devices.kubevirt.io/sev", "/dev/sev", 1000),
    ]


def test_the_default_file_is_read_where_it_is(file: Path) -> None:
    file.write_text('[agent]\nresync = "7s"\n')
    config = load(None, FakeRegistry(), default=file)
    assert (config.source, config.agent.resync) == (file, 7.0)


def test_a_selector_or_name_that_no_device_could_match_says_what_was_probably_meant(file: Path) -> None:
    file.write_text("""[[resource]]
name = "nvidia.com/mig-{profle}"
backend = "gpu"
select = [{ vendro = "10de" }, { vendor = "0x10de", address = ["0000:3b:00.0", "3b:00.0"] }, { device = 0x2330 }]
exclude = { function = "virtul" }
""")
    with pytest.raises(ConfigError) as error:
        load(file)
    assert [line.removeprefix(f"{file}:") for line in error.value.sentence.splitlines()] == [
        "2: resource[0].name: there is no attribute 'profle'; did you mean 'profile'?",
        "4: resource[0].select[0].vendro: there is no attribute 'vendro'; did you mean 'vendor'?",
        (
            "4: resource[0].select[1].vendor: no device has '0x10de': vendor is four hexadecimal digits in quotes, "
            "as in '10de'; did you mean '10de'?"
        ),
        (
            "4: resource[0].select[1].address: no device has '3b:00.0': address is a PCI address with its domain, "
            "as in '0000:3b:00.0'; did you mean '0000:3b:00.0'?"
        ),
        (
            "4: resource[0].select[2].device: 9008 is ambiguous without quotes; device is four hexadecimal digits in quotes, "
            "as in '10de'"
        ),
        "5: resource[0].exclude.function: no device has 'virtul': function is 'physical' or 'virtual'",
    ]


def test_a_range_of_numbers_selects_each_of_them(file: Path) -> None:
    text = '[[resource]]\nname = "a.b/net"\nbackend = "sriov"\nadditional_info = { "*" = { mtu = "9000" } }\n'
    file.write_text(text + 'select = { pf = "ens1f0", vf = ["0-2", 7] }\n')
    (resource,) = load(file).resources
    assert resource.spec.select == ({"pf": ("ens1f0",), "vf": ("0", "1", "2", "7")},)
    assert resource.spec.options.additional_info == {"*": {"mtu": "9000"}}
    file.write_text(text + 'select = { vf = "3-1" }\n')
    with pytest.raises(ConfigError, match="'3-1' is no range: vf goes up, as in '0-7'"):
        load(file)
