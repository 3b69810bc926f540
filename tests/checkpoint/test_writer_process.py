"""The writer process: it writes the same files as this process would, whenever it dies, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageWriter

import stagereg
import stagereg.checkpoint.writer_process as process_module
import stagereg.stagers.shared_memory as shared_memory
import stagereg.stagers.tensor_bundle as tensor_bundle
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.encoding import leaves
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.writer_process import WriterProcess, write_data
from stagereg.errors import CheckpointError

# Writers that the process can import. A count of deaths is in a file beside the checkpoint.
WRITERS = """
import os, signal
from pathlib import Path
from torch.distributed.checkpoint.filesystem import FileSystemWriter

class Doomed(FileSystemWriter):
    def write_data(self, plan, planner):
        deaths = Path(str(self.path) + ".deaths")
        left = int(deaths.read_text())
        if left:
            deaths.write_text(str(left - 1))
            (Path(self.path) / "__0_0.distcp").write_bytes(b"half" * 100)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

class Failing(FileSystemWriter):
    def write_data(self, plan, planner):
        raise Odd("this", "that")

class Counting(FileSystemWriter):
    written = 0
    def write_data(self, plan, planner):
        self.written += 1
        self.by = os.getpid()
        return super().write_data(plan, planner)
"""

# Processes that import no torch: one answers with what it was asked, the other never answers.
ECHO = process_module._BEGIN + (
    "from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[1]))\n"
    "while question := connection.recv_bytes():\n"
    "    connection.send_bytes(question)"
)
BUSY = process_module._BEGIN + "time.sleep(600)"


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("importable")
    (folder / "stagereg_test_writers.py").write_text(WRITERS)
    sys.path.insert(0, str(folder))
    import stagereg_test_writers

    yield stagereg_test_writers
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def process(writers: Any) -> Iterator[WriterProcess]:
    """One for all tests; any of them may kill it."""
    made = WriterProcess()
    yield made
    made.close()


def state(value: float = 1.0) -> dict[str, Any]:
    x = torch.arange(12.0) * value
    return {
        "model": {"w": torch.full((1000,), value), "t": x.view(3, 4).t(), "h": x.to(torch.bfloat16), "tied": x[2:6]},
        "half": torch.ones(64, 3)[:, 1],
        "empty": torch.empty(0, 4),
        "one": torch.tensor(value, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "c": torch.view_as_complex(torch.ones(3, 2)).conj(),
        "step": 7,
        "names": ["a", "b"],
    }


@pytest.fixture
def copy() -> Iterator[dict[str, Any]]:
    stager = stagereg.build("stager", "shared")
    yield stager.stage(state())
    stager.close()


def save(copy: dict[str, Any], writer: StorageWriter, process: WriterProcess | None = None, path: Any = None) -> None:
    """Write as ``torch.distributed.checkpoint.save`` does, in ``process`` if there is one."""
    planner = DefaultSavePlanner()
    writer.reset(path)
    planner.set_up_planner(copy, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    plan = planner.finish_plan(plan)
    written = write_data(writer, plan, planner, process) if process else writer.write_data(plan, planner).wait()
    writer.finish(metadata, [written])


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".metadata"}


def kill(pid: int | None) -> None:
    """Kill a process and return when it is dead; it has not been reaped yet."""
    assert pid is not None
    alive = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([alive], [], [], 30)[0]
    os.close(alive)


def exists(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("source", ["shared", "pinned_cached", "none"])
def test_what_it_writes_is_what_would_be_written_here(tmp_path: Path, process: WriterProcess, source: str) -> None:
    copy = state() if source == "none" else stagereg.build("stager", source).stage(state())
    save(copy, FileSystemWriter(tmp_path / "there"), process)
    save(copy, FileSystemWriter(tmp_path / "here"))
    if source == "shared":
        assert content(tmp_path / "there") == content(tmp_path / "here")
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id=tmp_path / "there", no_dist=True)
    for (name, x), (_, y) in zip(leaves(state(), ""), leaves(loaded, ""), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_every_storage_writes_there_and_its_marks_are_known_here(
    tmp_path: Path, process: WriterProcess, kind: str
) -> None:
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    storage, stager = stagereg.build("storage", kind), stagereg.build("stager", "shared")
    stager.reserve_padding(*storage.padding)
    for step in (1.0, 2.0):
        path = tmp_path / str(step)
        source = {"w": torch.arange(3000.0) * step, "v": torch.full((70, 3), step).t(), "n": step}
        save(stager.stage(source), storage, process, path)
        assert set(storage.marks) == {file.name for file in path.iterdir()}
        for name, mark in storage.marks.items():
            assert mark == FileMark((path / name).stat().st_size, zlib.crc32((path / name).read_bytes()))


def test_the_process_writes_and_the_storage_remembers(
    tmp_path: Path, process: WriterProcess, writers: Any, copy: Any
) -> None:
    writer = writers.Counting(tmp_path)
    for count in (1, 2):
        save(copy, writer, process)
        assert (writer.written, writer.by) == (count, process.pid)


def test_no_bytes_of_tensors_are_sent(tmp_path: Path, process: WriterProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[int] = []
    ask = process.ask
    monkeypatch.setattr(process, "ask", lambda asked, *more: questions.append(len(asked)) or ask(asked, *more))
    stager = stagereg.build("stager", "shared")
    for n in (10, 2**22):
        save(stager.stage({"w": torch.ones(n)}), FileSystemWriter(tmp_path / str(n)), process)
    assert questions[1] - questions[0] < 64
    assert questions[1] < 4096


@pytest.mark.parametrize("why", ["Mine or its plan cannot be pickled", "cannot be opened"])
def test_what_cannot_be_sent_or_opened_there_is_written_here(
    tmp_path: Path,
    process: WriterProcess,
    copy: Any,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mine(FileSystemWriter):
        pass

    def elsewhere(address: int) -> Any:
        found = shared_memory.handle_of(address)
        return found and (found[0]._replace(path="/proc/self/fd/no"), found[1])

    if why == "cannot be opened":
        monkeypatch.setattr(tensor_bundle, "handle_of", elsewhere)
    save(copy, (Mine if "Mine" in why else FileSystemWriter)(tmp_path / "there"), process)
    save(copy, FileSystemWriter(tmp_path / "here"))
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert why in caplog.text


def test_an_error_there_is_raised_here_and_the_process_goes_on(
    tmp_path: Path, process: WriterProcess, copy: Any, writers: Any
) -> None:
    (tmp_path / "bad/__0_0.distcp").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        save(copy, FileSystemWriter(tmp_path / "bad"), process)
    assert caught.value.errno == errno.EISDIR
    assert str(tmp_path / "bad/__0_0.distcp") in str(caught.value)
    pid = process.pid
    with pytest.raises(RuntimeError, match="Odd: this and that"):  # one that cannot be sent
        save(copy, writers.Failing(tmp_path / "odd"), process)
    save(copy, FileSystemWriter(tmp_path / "good"), process)
    assert process.pid == pid


def test_a_process_that_dies_while_it_writes_is_replaced_once(
    tmp_path: Path, process: WriterProcess, writers: Any, copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = process.pid
    (tmp_path / "1.deaths").write_text("1")
    save(copy, writers.Doomed(tmp_path / "1"), process)
    save(copy, FileSystemWriter(tmp_path / "2"))
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert "was ended by SIGKILL; another one is started" in caplog.text
    assert before is None or not exists(before)
    (tmp_path / "1.deaths").write_text("2")
    with pytest.raises(CheckpointError, match="was ended by SIGKILL, and so did the one before"):
        save(copy, writers.Doomed(tmp_path / "1"), process)
    save(copy, FileSystemWriter(tmp_path / "3"), process)


def test_death_is_noticed_though_another_has_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: list[int] = []
    pipe = process_module.Pipe

    def kept() -> Any:
        here, there = pipe()
        elsewhere.append(os.dup(there.fileno()))
        return here, there

    monkeypatch.setattr(process_module, "Pipe", kept)
    monkeypatch.setattr(process_module, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    process = WriterProcess()
    with pytest.raises(CheckpointError, match="so did the one before"):
        process.ask(b"question")
    process.close()
    for end in elsewhere:
        os.close(end)


@pytest.mark.parametrize("nbytes", [1, 2**24])  # more than a socket holds
def test_a_process_that_does_not_answer_in_time_is_killed(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(process_module, "_PROGRAM", BUSY)
    process = WriterProcess()
    pid = process.pid
    with pytest.raises(CheckpointError, match="in time and was killed"):
        process.ask(bytes(nbytes), until=time.monotonic() + 0.1)
    assert process.pid is None
    assert not exists(pid)
    monkeypatch.setattr(process_module, "_PROGRAM", ECHO)
    assert process.ask(b"question") == b"question"
    process.close()


def test_closing_it_now_ends_a_question_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_PROGRAM", BUSY)
    process, seen = WriterProcess(), []

    def ask() -> None:
        try:
            process.ask(b"question")
        except CheckpointError as error:
            seen.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    process.close(now=True)
    thread.join(30)
    assert len(seen) == 1
    assert process.pid is None


@pytest.mark.parametrize("program", [ECHO, BUSY], ids=["waiting", "busy"])
def test_it_ends_with_its_parent_and_not_with_a_sibling(program: str) -> None:
    script = (
        f"import os, signal, sys; import stagereg.checkpoint.writer_process as module; module._PROGRAM = {program!r}\n"
        "process = module.WriterProcess()\n"
        f"{program == BUSY} or process.ask(b'until it is there')\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN); os.killpg(0, signal.SIGUSR2)\n"  # as launchers do
        # A child that outlives the parent has the parent's end of the socket too.
        "print(process.pid, flush=True) if os.fork() else None; sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    assert not select.select([child], [], [], 0)[0]
    parent.kill()
    parent.wait()
    assert select.select([child], [], [], 30)[0]
    parent.communicate()
    os.close(child)


def test_a_forked_child_that_exits_leaves_it_alone() -> None:
    script = (
        f"import os, sys; from stagereg.checkpoint import writer_process as module; module._PROGRAM = {ECHO!r}\n"
        "process = module.WriterProcess(); process.ask(b'no question'); pid = process.pid; child = os.fork()\n"
        "if not child: sys.exit()\n"
        "os.waitpid(child, 0); process.ask(b'no question'); print(pid == process.pid)"
    )
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout.split() == ["True"]


def test_it_ignores_ctrl_c_and_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_PROGRAM", ECHO)
    process = WriterProcess()
    assert process.ask(b"what") == b"what"
    pid = process.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert b"CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    os.kill(pid, signal.SIGINT)
    assert process.ask(b"again") == b"again"
    assert process.pid == pid
    process.close()
    process.close()
    assert not exists(pid)
    assert process.pid is None
    with pytest.raises(CheckpointError, match="closed"):
        process.ask(b"")


def test_a_checkpointer_writes_shared_copies_there_and_no_others(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "alone"), stager=stagereg.build("stager", "blocking")) as checkpointer:
        assert checkpointer.writer_pid is None
    with Checkpointer(str(tmp_path), stager=stagereg.build("stager", "shared")) as checkpointer:
        first = checkpointer.writer_pid
        assert first is not None, "it is started ahead of the first save"
        checkpointer.save(1, {"x": torch.arange(5.0), "n": 3})
        checkpointer.wait()
        assert checkpointer.writer_pid == first
        kill(first)
        checkpointer.save(2, {"x": torch.arange(5.0) + 1, "n": 4})
        checkpointer.wait()
        assert not exists(first), "no zombie is left"
        second = checkpointer.writer_pid
        assert second not in (first, None)
        restored = {"x": torch.zeros(5), "n": 0}
        assert checkpointer.restore(restored) == 2
        assert restored["x"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert restored["n"] == 4
    assert not exists(second)
