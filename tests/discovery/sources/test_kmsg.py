from __future__ import annotations

import asyncio
import errno
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.discovery import kmsg
from agent.discovery.kmsg import KmsgSource, Line, parse, split
from agent.discovery.sources import Emitted
from agent.runtime.problems import Problems
from backends.base import Host, Record
from tests.backends.trees import plant
from tests.e2e.kmsg import USER, KernelLog, record
from tests.wait import limit, settled, until

BOOT = "6b0b1c6e-8a6a-4c39-9d2c-7a2e5c1f3d11"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
WANTED = frozenset({"NVRM: Xid"})
H100 = Path(__file__).parents[2] / "backends/gpu/h100/kmsg.txt"
OVERWRITTEN = "the kernel overwrote lines of its log before they were read"

texts = st.text(st.characters(codec="utf-8"))
names = st.text(st.characters(codec="ascii", exclude_characters="=\n"), min_size=1)


# --- the format ---


@given(texts, st.dictionaries(names, texts), st.integers(0, 23), st.integers(0, 1 << 63), st.sampled_from("-c"))
@example("a\\x20b\n é \t", {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:3b:00.0"}, 0, 4711, "-,caller=T17")
def test_every_record_is_read_as_it_was_written(
    text: str, properties: dict[str, str], facility: int, sequence: int, flags: str
) -> None:
    written = record(sequence, text, properties, facility=facility, microseconds=1_500_000, flags=flags)
    records, rest = split(written)
    assert [parse(found) for found in records] == [
        Line(facility, sequence, 1.5, text, properties, flags.startswith("c"))
    ]
    assert rest == b""


@given(st.lists(st.tuples(texts, st.dictionaries(names, texts, max_size=2)), max_size=5), st.integers(0))
def test_several_records_in_one_read_are_told_apart_and_a_cut_one_is_kept(
    written: list[tuple[str, dict[str, str]]], cut: int
) -> None:
    data = b"".join(record(n, *each) for n, each in enumerate(written))
    assert len(split(data)[0]) == len(written)
    records, rest = split(data[: cut % (len(data) + 1)])
    assert b"".join(found + b"\n" for found in records) + rest == data[: cut % (len(data) + 1)]


@given(st.binary())
@example(b"6," + b"9" * 5000 + b",1,-;x")
@example(b"1,2,3,-;\\xzz\n =\n")
def test_no_bytes_upset_it(data: bytes) -> None:
    for found in split(data)[0]:
        parse(found)
    parse(data)


@pytest.mark.needs("/dev/kmsg")
def test_the_real_log_is_understood() -> None:
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    lines = []
    try:
        while True:
            try:
                read = os.read(log, 8192)
            except BrokenPipeError:
                continue  # the kernel has just overwritten it: the next read has what came after
            (found,), rest = split(read)
            assert rest == b""
            line = parse(found)
            assert line is not None, found
            lines.append(line)
    except BlockingIOError:
        pass
    finally:
        os.close(log)
    assert lines
    sequences = [line.sequence for line in lines]
    assert sequences == sorted(sequences)
    up = float(Path("/proc/uptime").read_text().split()[0])
    passed = up * 1.001 + 1  # NTP slows this clock down by 1/2000 at most, and the log's not at all
    assert 0 <= lines[0].time <= lines[-1].time <= passed
    about = [line.properties for line in lines if line.properties]
    assert all({"SUBSYSTEM", "DEVICE"} <= found.keys() for found in about)


# --- the source ---


class Reading:
    """A source that reads, and what it handed on."""

    def __init__(self, root: Path, after: tuple[str, int] | None = None, host: Host | None = None) -> None:
        self.records: list[Record] = []
        self.problems, self.after = Problems(), after
        self.source = KmsgSource(self._take, host or Host.below(root), problems=self.problems)
        self.source.watch(WANTED)

    def _take(self, said: Emitted) -> None:
        assert isinstance(said, Record)
        self.records.append(said)

    def texts(self) -> list[str]:
        return [found.text for found in self.records]

    async def have(self, *texts: str) -> None:
        await until(lambda: len(self.records) >= len(texts), "these lines", self.texts)
        assert self.texts() == list(texts)


@asynccontextmanager
async def reading(reading: Reading) -> AsyncIterator[Reading]:
    task = asyncio.ensure_future(reading.source.run(reading.after))
    try:
        async with limit("it has caught up", reading.texts):
            await reading.source.caught_up.wait()
        yield reading
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The root of a pretend node that knows its boot."""
    boot_id = tmp_path / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text(f"{BOOT}\n")
    (tmp_path / "dev").mkdir()
    return tmp_path


@pytest.fixture
def log(node: Path) -> Iterator[KernelLog]:
    with KernelLog(node / "dev/kmsg") as made:
        yield made


async def test_a_wanted_line_becomes_a_record_and_others_do_not(node: Path, log: KernelLog) -> None:
    log.say("usb 1-2: new high-speed USB device")
    log.write(record(1, XID, {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:3b:00.0"}, microseconds=4_711_500_000))
    async with reading(Reading(node)) as it:
        (found,) = it.records
        assert (found.source, found.boot, found.sequence, found.text) == ("kmsg", BOOT, 1, XID)
        assert found.properties == {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:3b:00.0"}
        assert found.time == 4711.5
        log.say("NVRM: GPU 0000:3b:00.0 is fine")
        log.say("NVRM: Xid (PCI:0000:5e:00): 48")
        await it.have(XID, "NVRM: Xid (PCI:0000:5e:00): 48")


async def test_lines_of_nvidias_driver_count_though_it_prints_each_as_the_rest_of_another(
    node: Path, log: KernelLog
) -> None:
    log.write(H100.read_bytes())
    async with reading(Reading(node)) as it:
        assert [found.sequence for found in it.records] == list(range(361, 373))
        assert it.texts()[0].startswith("NVRM: Xid (PCI:0000:00:06): 31, pid=1634, name=python3, channel 0x0000001e")
        assert it.records[0].time == 75.349193


@pytest.mark.parametrize("flags", ["-", "-,caller=T17", "c", "c,caller=C3", "+"])
@pytest.mark.parametrize(
    ("prefix", "tags"),
    [("", {}), ("nvidia 0000:3b:00.0: ", {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:3b:00.0"})],
)
async def test_a_drivers_line_counts_by_whichever_of_the_kernels_functions_it_was_printed(
    node: Path, log: KernelLog, flags: str, prefix: str, tags: dict[str, str]
) -> None:
    log.write(record(0, "systemd[1]: Started Journal Service.") + record(1, prefix + XID, tags, flags=flags))
    async with reading(Reading(node)) as it:
        await it.have(prefix + XID)


@pytest.mark.parametrize(
    "cut",
    [
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=",  # 4.19 on; a cgroup's name follows
        "python3: page allocation failure: order:4, mode:0x40dc0(GFP_KERNEL), nodemask=(null),cpuset=",
        "stress cpuset=",  # dump_header until 4.18
        "cpuset: failed to transfer tasks out of empty cpuset ",
        "si4713 2-0063: RDS Radio Text: ",  # VIDIOC_LOG_STATUS; a control's value follows
    ],
)
async def test_a_users_text_that_a_cut_line_goes_on_with_is_not_believed(node: Path, log: KernelLog, cut: str) -> None:
    second = 1_000_000
    log.write(
        record(0, cut, microseconds=50 * second)
        + record(1, "eth0: link up", microseconds=50 * second)  # of another CPU: it cuts the line
        + record(2, XID, flags="c", microseconds=50 * second + 20)
        + record(3, ",mems_allowed=0,global_oom", flags="c", microseconds=50 * second + 40)
        + record(4, XID, flags="c", microseconds=109 * second)  # the task can have been kept from its CPU
        + record(5, f"whole {XID}", microseconds=109 * second)
        + record(6, "NVRM: Xid that no fragment is", microseconds=109 * second)
        + record(7, "NVRM: Xid when no rest can come any more", flags="c", microseconds=110 * second)
    )
    with capture_logs() as lines:
        async with reading(Reading(node)) as it:
            assert it.texts() == ["NVRM: Xid that no fragment is", "NVRM: Xid when no rest can come any more"]
    (said,) = [line["reason"] for line in lines if line["event"] == "kernel-lines-lost"]
    assert said == "a line of it was cut in two, and what came next may be a user's text in place of a driver's"


@pytest.mark.parametrize(
    ("text", "tags", "flags"),
    [
        ("NVRM: =============== GSP-RM unresponsive ==================", {}, "c"),  # kernel_gsp.c, before an XID 119
        ("NVRM: Sent following content to FSP: ", {}, "c"),  # kern_fsp_gh100.c
        ("nvidia 0000:3b:00.0: DSD properties: ", {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:3b:00.0"}, "-"),
        ("==================================================================", {}, "-"),  # KASAN, lockdep
    ],
)
async def test_a_whole_line_that_only_looks_cut_keeps_no_xid_back(
    node: Path, log: KernelLog, text: str, tags: dict[str, str], flags: str
) -> None:
    log.write(record(0, text, tags, flags=flags) + record(1, XID, flags="c"))
    async with reading(Reading(node)) as it:
        assert it.texts() == [XID]


async def test_what_user_space_writes_cuts_no_line(node: Path, log: KernelLog) -> None:
    log.write(record(0, "mine,cpuset=", facility=USER) + record(1, XID, flags="c"))
    async with reading(Reading(node)) as it:
        assert it.texts() == [XID]


@pytest.mark.needs("/dev/kmsg", "root")
async def test_what_user_space_writes_to_the_real_log_is_not_believed(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node / "dev/kmsg").symlink_to("/dev/kmsg")
    text = f"fairlead-test-{uuid.uuid4()}"
    seen: list[Line] = []
    it = Reading(node)
    it.source.watch(frozenset({text}))
    real = kmsg.parse

    def noted(found: bytes) -> Line | None:
        if (line := real(found)) is not None and text in line.text:
            seen.append(line)
        return line

    monkeypatch.setattr(kmsg, "parse", noted)
    async with reading(it):
        for claimed in (f"<4>{text}\n", f"<0>{text}\n"):  # levels of the facility "kernel"; shown once they end
            await asyncio.to_thread(Path("/dev/kmsg").write_text, claimed)
        await until(lambda: len(seen) >= 2, "both lines", lambda: seen)
        assert it.records == []
        assert {line.facility for line in seen} == {USER}


async def test_a_restart_reads_no_line_twice(node: Path, log: KernelLog) -> None:
    log.say("NVRM: Xid one")
    handled = log.say("NVRM: Xid two")
    log.say("NVRM: Xid three")
    async with reading(Reading(node, after=(BOOT, handled))) as it:
        assert it.texts() == ["NVRM: Xid three"]


@pytest.mark.parametrize("boot", ["another boot", ""])
async def test_after_another_boot_every_line_is_new(node: Path, log: KernelLog, boot: str) -> None:
    if not boot:  # nobody can tell: lines of this boot may bear the same numbers
        (node / "proc/sys/kernel/random/boot_id").unlink()
    log.say("NVRM: Xid one")
    async with reading(Reading(node, after=(boot, 7))) as it:
        assert it.texts() == ["NVRM: Xid one"]


async def test_a_text_that_is_wanted_later_is_looked_for_from_the_start_and_no_line_is_told_twice(
    node: Path, log: KernelLog
) -> None:
    said = ["NVRM: Xid one", "mlx5_core: dead", "NVRM: Xid after mlx5_core"]
    for text in said:
        log.say(text)
    async with reading(Reading(node)) as it:
        assert it.texts() == [said[0], said[2]]
        it.source.watch(WANTED | {"mlx5_core"})
        log.repeat()  # a FIFO forgets what was read
        log.say("NVRM: Xid again")
        await it.have(said[0], said[2], said[1], "NVRM: Xid again")
        it.source.watch(frozenset())
        log.say("NVRM: Xid unwanted")
        await settled()
        assert len(it.records) == 4
        it.source.watch(WANTED)
        await until(lambda: "NVRM: Xid unwanted" in it.texts())
        assert len(it.records) == 5


async def test_a_log_is_opened_only_when_something_is_wanted_of_it(node: Path) -> None:
    it = Reading(node)
    it.source.watch(frozenset())
    task = asyncio.ensure_future(it.source.run())
    await settled()
    assert not task.done()  # although there is no log
    it.source.watch(WANTED)
    with pytest.raises(FileNotFoundError):
        async with limit("it is opened"):
            await task
    assert it.source.caught_up.is_set()  # whoever waits for it need not


async def test_records_that_come_together_or_in_pieces_are_read(node: Path, log: KernelLog) -> None:
    async with reading(Reading(node)) as it:
        whole = record(1, "NVRM: Xid one", {"SUBSYSTEM": "pci"}) + record(2, "NVRM: Xid two")
        log.write(whole[:-5])
        await it.have("NVRM: Xid one")
        assert it.records[0].properties == {"SUBSYSTEM": "pci"}
        log.write(whole[-5:])
        await it.have("NVRM: Xid one", "NVRM: Xid two")


async def test_what_is_no_record_is_passed_over_and_said_once(node: Path, log: KernelLog) -> None:
    with capture_logs() as lines:
        async with reading(Reading(node)) as it:
            log.write(b"\n\n<4>hello\n KEY=of nothing\n" + b"x" * 20_000 + b"\n\xff\xfe\n")
            log.say(XID)
            await it.have(XID)
            assert [shown.part for shown in it.problems.lasting()] == ["kernel-log"]
    assert [line["event"] for line in lines] == ["kernel-lines-lost"]


# --- what goes wrong ---


def times_open(path: Path) -> int:
    """Of this file alone: other tests' leavings are closed at any time."""
    ours = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the directory's own is closed again
            ours += link.readlink() == path
    return ours


def answering(monkeypatch: pytest.MonkeyPatch, *answers: bytes | int) -> None:
    """Have the next reads of the source answer this: bytes, or an error's number; then the log again."""
    real, queue = os.read, list(answers)

    def read(file: int, size: int) -> bytes:
        if size != kmsg._READ_BYTES or not queue:
            return real(file, size)
        answer = queue.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    monkeypatch.setattr(os, "read", read)


async def test_overwritten_lines_are_said_once_and_the_next_ones_read(
    node: Path, log: KernelLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, errno.EPIPE, record(1, "NVRM: Xid one"), errno.EPIPE, errno.EPIPE, record(9, XID))
    with capture_logs() as lines:
        async with reading(Reading(node)) as it:
            await it.have("NVRM: Xid one", XID)
    assert [(line["event"], line["reason"]) for line in lines] == [("kernel-lines-lost", OVERWRITTEN)]


@pytest.mark.needs("/dev/kmsg")
async def test_lines_of_the_real_log_that_are_too_long_are_passed_over(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node / "dev/kmsg").symlink_to("/dev/kmsg")
    longest = 60
    monkeypatch.setattr(kmsg, "_READ_BYTES", longest)
    seen: list[bytes] = []
    it = Reading(node)
    monkeypatch.setattr(it.source, "_take", seen.append)
    with capture_logs() as lines:
        async with reading(it):
            assert seen
            assert max(map(len, seen)) < longest
    reasons = [line["reason"] for line in lines if line["reason"] != OVERWRITTEN]  # as a full log is at any time
    assert reasons == ["a line of the kernel's log is longer than 60 bytes"]


def nothing(path: Path) -> None:
    pass


def a_file(path: Path) -> None:
    path.write_bytes(record(1, "NVRM: Xid one"))


def null(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (nothing, "cannot be read: .*/dev/kmsg: No such file or directory; .*device 1:11.*CAP_SYSLOG"),
        (null, "is not the kernel's log: it has an end"),
        (a_file, "is not the kernel's log: it has an end"),
        (Path.mkdir, "/dev/kmsg cannot be read: Is a directory"),
    ],
)
async def test_what_cannot_be_read_is_told_in_a_sentence(
    node: Path, there: Callable[[Path], None], sentence: str
) -> None:
    there(node / "dev/kmsg")
    it = Reading(node)
    with pytest.raises(OSError, match=sentence):
        async with limit("it fails"):
            await it.source.run()
    assert it.source.caught_up.is_set()


@pytest.mark.parametrize(
    ("number", "rights", "users", "restricted", "by_cgroup"),
    [
        (errno.EPERM, 1 << 34, "0 0 4294967295", "1", True),
        (errno.EPERM, 1 << 21, "0 0 4294967295", "1", True),
        (errno.EPERM, 0, "0 0 4294967295", "0", True),
        (errno.EPERM, 0, "0 0 4294967295", "1", False),  # the capability is missing
        (errno.EPERM, 1 << 34, "0 100000 65536", "1", False),  # it counts for nothing in a user namespace
        (errno.EACCES, 1 << 34, "0 0 4294967295", "0", False),  # the node's mode, or SELinux
    ],
)
def test_a_device_cgroup_is_to_blame_where_nothing_else_can_be(
    tmp_path: Path, number: int, rights: int, users: str, restricted: str, by_cgroup: bool
) -> None:
    own = f"self/status = CapEff:\t{rights:016x}\nself/uid_map = {users}\nsys/kernel/dmesg_restrict = {restricted}\n"
    plant(tmp_path, own)
    assert kmsg.is_denied_by_cgroup(OSError(number, "no"), tmp_path) is by_cgroup


async def test_after_a_failure_nothing_is_told_twice_and_no_file_stays_open(
    node: Path, log: KernelLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.say("NVRM: Xid one")
    before = times_open(log.path)
    it = Reading(node)
    answering(monkeypatch, record(0, "NVRM: Xid one"), errno.EIO)
    with pytest.raises(OSError, match="kmsg cannot be read: Input/output error"):
        await it.source.run()
    it.source.watch(WANTED | {"amdgpu"})  # meanwhile
    log.say(XID)
    async with reading(it):
        await it.have("NVRM: Xid one", XID)
    assert times_open(log.path) == before == 1
