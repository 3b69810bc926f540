"""The writer process: it writes the same files as this process would, whenever it dies, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

import stagereg
import stagereg.checkpoint.process as process_module
import stagereg.stagers.shared_memory as shared_memory
import stagereg.stagers.tensor_bundle as tensor_bundle
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.process import WriterProcess
from stagereg.checkpoint.process_writer import ProcessWriter
from stagereg.checkpoint.storage.protocol import UsesPadding
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks

# Writers that the process can import. A count of deaths is in a file beside the checkpoint.
DOOMED = """
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


# A process that imports no torch and answers with what it was asked; and one that is never done importing.
BELONGS = process_module._START.partition("import torch")[0]
ECHO = BELONGS + "serve(int(sys.argv[1]), bytes)"
BUSY = BELONGS + "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("importable")
    (folder / "stagereg_test_writers.py").write_text(DOOMED)
    sys.path.insert(0, str(folder))
    import stagereg_test_writers

    yield stagereg_test_writers
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def old_process(writers: Any) -> Iterator[WriterProcess]:
    made = WriterProcess()
    made.start()
    yield made
    made.close()


@pytest.fixture
def process(old_process: WriterProcess) -> WriterProcess:
    """Any one that works; it may be killed."""
    return old_process


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


def save(copy: dict[str, Any], writer: StorageWriter) -> None:
    dcp.save(copy, storage_writer=writer, no_dist=True)


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".metadata"}


def kill(process: WriterProcess) -> int:
    """Kill it and return when it is dead; it has not been reaped yet."""
    pid = process.pid
    assert pid is not None
    alive = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([alive], [], [], 30)[0]
    os.close(alive)
    return pid


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class TestWriting:
    @pytest.mark.parametrize("source", ["shared", "pinned_cached", "none"])
    def test_the_files_are_those_that_are_written_here(self, tmp_path, process, source) -> None:
        copy = state() if source == "none" else stagereg.build("stager", source).stage(state())
        save(copy, ProcessWriter(FileSystemWriter(tmp_path / "there"), process))
        save(copy, FileSystemWriter(tmp_path / "here"))
        assert content(tmp_path / "there") == content(tmp_path / "here")
        assert (tmp_path / "there/.metadata").exists()

    @pytest.mark.parametrize("kind", ["dcp", "direct", "safetensors"])
    def test_every_storage_writes_there_and_knows_the_marks_here(self, tmp_path, process, kind) -> None:
        if kind == "safetensors":
            pytest.importorskip("safetensors")
        storage, stager = stagereg.build("storage", kind), stagereg.build("stager", "shared")
        if isinstance(storage, UsesPadding):
            stager.reserve_padding(*storage.padding)
        for step in (1.0, 2.0):
            path = tmp_path / str(step)
            source = {"w": torch.arange(3000.0) * step, "v": torch.full((70, 3), step).t(), "n": step}
            dcp.save(
                stager.stage(source), checkpoint_id=path, storage_writer=ProcessWriter(storage, process), no_dist=True
            )
            assert set(storage.marks) == {file.name for file in path.iterdir()}
            for name, mark in storage.marks.items():
                assert mark == FileMark((path / name).stat().st_size, zlib.crc32((path / name).read_bytes()))
            loaded = {"w": torch.zeros(3000), "v": torch.zeros(3, 70), "n": 0.0}
            dcp.load(loaded, storage_reader=storage.reader(path), no_dist=True)
            assert torch.equal(loaded["w"], source["w"])
            assert torch.equal(loaded["v"], source["v"])
            assert loaded["n"] == step

    def test_it_is_the_process_that_writes_and_the_writer_remembers(self, tmp_path, process, writers, copy) -> None:
        writer = writers.Counting(tmp_path)
        for count in (1, 2):
            save(copy, ProcessWriter(writer, process))
            assert (writer.written, writer.by) == (count, process.pid)

    def test_no_bytes_of_tensors_are_sent(self, tmp_path, process, monkeypatch) -> None:
        questions: list[int] = []
        ask = process.ask
        monkeypatch.setattr(process, "ask", lambda asked, *more: questions.append(len(asked)) or ask(asked, *more))
        stager = stagereg.build("stager", "shared")
        for n in (10, 2**22):
            save(stager.stage({"w": torch.ones(n)}), ProcessWriter(FileSystemWriter(tmp_path / str(n)), process))
        assert questions[1] - questions[0] < 64
        assert questions[1] < 4096

    def test_a_saved_state_is_loaded(self, tmp_path, process, copy) -> None:
        save(copy, ProcessWriter(FileSystemWriter(tmp_path), process))
        loaded = state(0.0)
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(loaded["model"]["t"], state()["model"]["t"])
        assert torch.equal(loaded["c"], state()["c"])
        assert loaded["names"] == ["a", "b"]

    def test_a_writer_that_the_process_cannot_import_writes_here(self, tmp_path, process, copy, caplog) -> None:
        class Mine(FileSystemWriter):
            by = 0

            def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
                self.by = os.getpid()
                return super().write_data(plan, planner)

        mine = Mine(tmp_path)
        save(copy, ProcessWriter(mine, process))
        assert mine.by == os.getpid()
        assert "Mine or its plan cannot be pickled" in caplog.text

    def test_memory_that_the_process_may_not_open_is_written_from_here(
        self, tmp_path, process, copy, monkeypatch, caplog
    ) -> None:
        def elsewhere(address: int) -> Any:
            found = shared_memory.handle_of(address)
            return found and (found[0]._replace(path="/proc/self/fd/no"), found[1])

        monkeypatch.setattr(tensor_bundle, "handle_of", elsewhere)
        save(copy, ProcessWriter(FileSystemWriter(tmp_path / "there"), process))
        save(copy, FileSystemWriter(tmp_path / "here"))
        assert content(tmp_path / "there") == content(tmp_path / "here")
        assert "cannot be opened" in caplog.text

    def test_the_memory_is_free_when_the_write_has_returned(self, tmp_path, process) -> None:
        stager = stagereg.build("stager", "shared", max_in_flight=1, wait_s=0.0)
        mappings = set()
        for step in range(4):
            copy = stager.stage({"w": torch.full((10_000,), float(step))})
            mappings.add(os.readlink(f"/proc/self/map_files/{_mapping_of(copy['w'])}"))
            save(copy, ProcessWriter(FileSystemWriter(tmp_path / str(step)), process))
            del copy
        assert len(mappings) == 1


def _mapping_of(x: torch.Tensor) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= x.data_ptr() < end:
            return line.split()[0]
    raise AssertionError("not mapped")


class TestFailing:
    def test_an_error_of_the_operating_system_is_raised_here(self, tmp_path, process, copy) -> None:
        (tmp_path / "__0_0.distcp").mkdir()
        with pytest.raises(CheckpointException) as caught:
            save(copy, ProcessWriter(FileSystemWriter(tmp_path), process))
        error = caught.value.failures[0][0]
        assert isinstance(error, IsADirectoryError)
        assert error.errno == errno.EISDIR
        assert str(tmp_path / "__0_0.distcp") in str(error)

    def test_an_error_that_cannot_be_sent_is_reported_as_text(self, tmp_path, process, writers, copy) -> None:
        with pytest.raises(CheckpointException) as caught:
            save(copy, ProcessWriter(writers.Failing(tmp_path), process))
        assert str(caught.value.failures[0][0]) == "Odd: this and that"

    def test_after_a_failure_the_process_stays_usable(self, tmp_path, process, copy) -> None:
        (tmp_path / "bad/__0_0.distcp").mkdir(parents=True)
        with pytest.raises(CheckpointException):
            save(copy, ProcessWriter(FileSystemWriter(tmp_path / "bad"), process))
        before = process.pid, process.restarts
        save(copy, ProcessWriter(FileSystemWriter(tmp_path / "good"), process))
        assert (process.pid, process.restarts) == before


class TestDying:
    def test_a_writer_killed_between_saves_is_replaced(self, tmp_path, process, copy, caplog) -> None:
        save(copy, ProcessWriter(FileSystemWriter(tmp_path / "1"), process))
        restarts, killed = process.restarts, kill(process)
        save(copy, ProcessWriter(FileSystemWriter(tmp_path / "2"), process))
        assert content(tmp_path / "1") == content(tmp_path / "2")
        assert process.restarts == restarts + 1
        assert not exists(killed), "no zombie is left"

    def test_a_writer_that_dies_while_it_writes_is_replaced_and_the_checkpoint_is_complete(
        self, tmp_path, process, writers, copy, caplog
    ) -> None:
        (tmp_path / "1.deaths").write_text("1")
        before = process.pid
        save(copy, ProcessWriter(writers.Doomed(tmp_path / "1"), process))
        save(copy, FileSystemWriter(tmp_path / "2"))
        assert content(tmp_path / "1") == content(tmp_path / "2")
        assert "was ended by SIGKILL; another one is started" in caplog.text
        assert before is None or not exists(before)

    def test_a_second_death_on_one_checkpoint_is_an_error_that_names_it(self, tmp_path, process, writers, copy) -> None:
        (tmp_path / "1.deaths").write_text("2")
        with pytest.raises(CheckpointException) as caught:
            save(copy, ProcessWriter(writers.Doomed(tmp_path / "1"), process))
        error = caught.value.failures[0][0]
        assert isinstance(error, CheckpointError)
        assert "was ended by SIGKILL, and so did the one before" in str(error)
        save(copy, ProcessWriter(FileSystemWriter(tmp_path / "2"), process))

    def test_death_is_noticed_although_another_process_has_the_socket(self, monkeypatch) -> None:
        elsewhere: list[socket.socket] = []
        pair = socket.socketpair

        def kept() -> tuple[socket.socket, socket.socket]:
            here, there = pair()
            elsewhere.append(there.dup())
            return here, there

        monkeypatch.setattr(process_module.socket, "socketpair", kept)
        process = WriterProcess()
        process.start()
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        unread = b"x" * 2**24  # more than a socket holds
        monkeypatch.setattr(process_module, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        with pytest.raises(CheckpointError, match="so did the one before"):
            process.ask(unread)
        process.close()
        for end in elsewhere:
            end.close()

    @pytest.mark.parametrize("start", [ECHO, BUSY], ids=["waiting", "importing"])
    def test_it_ends_when_its_parent_is_killed_and_not_when_a_sibling_is(self, start: str) -> None:
        program = (
            f"import os, signal, sys; from stagereg.checkpoint import process as module; module._START = {start!r}\n"
            "process = module.WriterProcess(); process.start()\n"
            f"{start == BUSY} or process.ask(b'until it is there')\n"
            "signal.signal(signal.SIGUSR2, signal.SIG_IGN); os.killpg(0, signal.SIGUSR2)\n"  # as launchers do
            # A child that outlives the parent has the parent's end of the socket too.
            "print(process.pid, flush=True) if os.fork() else None; sys.stdin.read()"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([child], [], [], 0)[0]
        parent.kill()
        parent.wait()
        assert select.select([child], [], [], 30)[0]
        parent.communicate()
        os.close(child)

    def test_a_forked_child_that_exits_leaves_it_alone(self) -> None:
        program = (
            f"import os, sys; from stagereg.checkpoint import process as module; module._START = {ECHO!r}\n"
            "process = module.WriterProcess(); process.ask(b'no question'); child = os.fork()\n"
            "if not child: sys.exit()\n"
            "os.waitpid(child, 0); pid = process.pid; process.ask(b'no question')\n"
            "print(pid == process.pid, process.restarts)"
        )
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert seen.stdout.split() == ["True", "0"]

    def test_close_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process_module, "_START", ECHO)
        process = WriterProcess()
        process.close()
        process = WriterProcess()
        process.start()
        assert process.ask(b"what") == b"what"
        pid = process.pid
        assert pid is not None
        assert exists(pid)
        process.close()
        process.close()
        assert not exists(pid)
        assert process.pid is None
        with pytest.raises(CheckpointError, match="closed"):
            process.ask(b"")


class TestSideEffects:
    def test_it_has_a_lower_priority_and_no_accelerator(self, process) -> None:
        process.ask(b"until it is there")
        assert process.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=" in environment

    def test_it_ignores_ctrl_c(self, tmp_path, process, copy) -> None:
        process.ask(b"until it is there")
        before = process.pid, process.restarts
        assert before[0] is not None
        os.kill(before[0], signal.SIGINT)
        save(copy, ProcessWriter(FileSystemWriter(tmp_path), process))
        assert (process.pid, process.restarts) == before

    def test_fifty_saves_leave_no_descriptor_and_no_memory(self, tmp_path, process) -> None:
        stager = stagereg.build("stager", "shared")

        def one(step: int) -> None:
            writer = FileSystemWriter(tmp_path / str(step % 2), sync_files=False)
            source = {"w": torch.full((2**18 + step % 3,), float(step)), "n": step}
            save(stager.stage(source), ProcessWriter(writer, process))

        def use() -> list[tuple[int, int]]:
            return [
                (len(os.listdir(f"/proc/{pid}/fd")), int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4)
                for pid in (os.getpid(), process.pid)
            ]

        for step in range(10):
            one(step)
        before, restarts = use(), process.restarts
        for step in range(50):
            one(step)
        assert process.restarts == restarts
        for (fds, kib), (more_fds, more_kib) in zip(before, use(), strict=True):
            assert more_fds <= fds
            assert more_kib - kib < 8 * 1024
        stager.close()


class TestCheckpointer:
    def test_copies_that_the_process_can_read_are_written_by_it(self, tmp_path, process) -> None:
        stager = stagereg.build("stager", "shared")
        with Checkpointer(str(tmp_path), stager=stager) as checkpointer:
            pid = checkpointer.writer_pid
            assert pid is not None, "it is started ahead of the first save"
            checkpointer.save(1, {"x": torch.arange(5.0), "n": 3})
            checkpointer.wait()
            assert checkpointer.writer_pid == pid
            kill_pid(pid)
            checkpointer.save(2, {"x": torch.arange(5.0) + 1, "n": 4})
            checkpointer.wait()
            assert checkpointer.writer_pid not in (pid, None)
            pid = checkpointer.writer_pid
            restored = {"x": torch.zeros(5), "n": 0}
            assert checkpointer.restore(restored) == 2
            assert restored["x"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
            assert restored["n"] == 4
        assert not exists(pid)

    def test_a_stager_that_keeps_its_memory_to_itself_needs_no_process(self, tmp_path) -> None:
        with Checkpointer(str(tmp_path), stager=stagereg.build("stager", "blocking")) as checkpointer:
            assert checkpointer.writer_pid is None

    @pytest.mark.slow
    def test_two_checkpointers_on_two_ranks_write_at_once_and_open_no_port(self, tmp_path) -> None:
        results = run_ranks(two_at_once, nproc=2, args=(str(tmp_path),))
        pids = [pid for result in results for pid in result[0]]
        assert len(set(pids)) == 4
        for _, sockets, restored in results:
            assert sockets == []
            assert restored == [3, 3, 6.0, 6.0]


def kill_pid(pid: int) -> None:
    alive = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([alive], [], [], 30)[0]
    os.close(alive)


def internet_sockets(pid: int) -> list[str]:
    """The sockets of a process that have to do with TCP, by inode."""
    tables = [Path(f"/proc/{pid}/net/{table}") for table in ("tcp", "tcp6")]
    inodes = {line.split()[9] for table in tables if table.exists() for line in table.read_text().splitlines()[1:]}
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return [link for link in links if link.startswith("socket:[") and link[8:-1] in inodes]


def two_at_once(rank: int, world_size: int, root: str) -> tuple[list[int], list[str], list[Any]]:
    made = [Checkpointer(f"{root}/{name}", stager=stagereg.build("stager", "shared")) for name in "ab"]
    for step in (1, 2, 3):
        for number, checkpointer in enumerate(made):
            checkpointer.save(step, {"x": torch.full((1000,), float(step * 2)), f"rank{rank}": rank, "n": number})
    for checkpointer in made:
        checkpointer.wait()
    pids = [checkpointer.writer_pid or 0 for checkpointer in made]
    sockets = [each for pid in pids for each in internet_sockets(pid)]
    states = [{"x": torch.zeros(1000), "n": -1} for _ in made]
    steps = [checkpointer.restore(into) for checkpointer, into in zip(made, states, strict=True)]
    for checkpointer in made:
        checkpointer.close()
    dist.barrier()
    return pids, sockets, [*steps, *(into["x"][0].item() for into in states)]
