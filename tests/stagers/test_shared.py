"""Shared memory: one descriptor, nothing copied, and never written while a process reads it, whichever process dies."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import stagereg
import stagereg.stagers.shared_memory as shared_memory
from stagereg import AsyncStager
from stagereg.errors import StagingError
from stagereg.kernel.memory import Pool
from stagereg.stagers.shared_memory import SharedBlock, register_reducers

from ..support.states import assert_whole, kept
from ..support.states import plain_state as state
from .test_fidelity import odd_tensors
from .test_properties import states

PROGRAM = """
import pickle, sys
import torch
from multiprocessing.reduction import ForkingPickler
here = {"ForkingPickler": ForkingPickler, "torch": torch}
while True:
    code, message = pickle.load(sys.stdin.buffer)
    here.update(message=message, answer=None)
    try:
        exec(code, here)
    except Exception as error:
        here["answer"] = f"{type(error).__name__}: {error}"
    pickle.dump(here["answer"], sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class Reader:
    """Another process that does what it is asked; it shares nothing with this one but two pipes."""

    def __init__(self) -> None:
        command, root = [sys.executable, "-W", "ignore", "-c", PROGRAM], Path(__file__).parents[2]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)

    def do(self, code: str, message: bytes = b"") -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((code, message), self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)  # at the death of the process: EOFError

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def old_reader() -> Iterator[Reader]:
    made = Reader()
    made.do("")  # it has started
    yield made
    made.kill()


@pytest.fixture
def reader(old_reader: Reader) -> Iterator[Reader]:
    """One that holds nothing, before and after."""
    yield old_reader
    old_reader.do("message = state = None")


@pytest.fixture
def stager() -> Iterator[AsyncStager]:
    made = stagereg.build("stager", "shared", max_in_flight=1, wait_s=0.0)
    yield made
    made.close()


def sent(copy: Any) -> bytes:
    return bytes(ForkingPickler.dumps(copy))


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_block() -> SharedBlock:
    register_reducers()
    return SharedBlock(4096, pin=False)


RECEIVE = "state = ForkingPickler.loads(message); answer = {name: x.unique().tolist() for name, x in state.items()}"


class TestSending:
    def test_many_tensors_cost_one_descriptor_here_and_there(self, stager, reader) -> None:
        source = {f"layer.{i}.weight": torch.full((i % 7,), i) for i in range(20_000)}
        mine, theirs = descriptors(), descriptors(reader.process.pid)
        copy = stager.stage(source)
        assert descriptors() - mine == 1
        reader.do("state = ForkingPickler.loads(message); answer = len(state)", sent(copy))
        assert descriptors(reader.process.pid) - theirs == 1
        assert descriptors() - mine == 1
        assert reader.do("answer = all((x == i).all() for i, x in enumerate(state.values()))")
        reader.do("state = None")
        assert descriptors(reader.process.pid) - theirs == 0

    def test_both_processes_see_the_same_memory(self, stager, reader) -> None:
        copy = stager.stage(state(1, n=2**20))
        message = sent(copy)
        assert len(message) < 2**12, "it has no bytes of the tensors"
        assert reader.do(RECEIVE, message) == {"w": [1.0], "v": [1.0]}
        reader.do("state['w'].fill_(5)")
        assert copy["w"].eq(5).all()
        assert copy["v"].eq(1).all()

    def test_tensors_that_are_no_copies_go_torchs_way(self, stager) -> None:
        copy = stager.stage(state(1))
        plain = torch.arange(10.0)
        received = ForkingPickler.loads(ForkingPickler.dumps({"plain": plain, "copy": copy["w"]}))
        assert torch.equal(received["plain"], plain)
        assert plain.is_shared()
        assert not copy["w"].is_shared()


class TestFidelity:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(drawn=states())
    def test_messages_arrive_equal_to_what_was_staged(self, stager, reader, drawn: dict[Any, Any]) -> None:
        odd = {name: x for name, x in odd_tensors().items() if name != "subclass"}  # whose class is unknown there
        odd["parameter"].tag = [1, "two"]
        copy = stager.stage({"odd": odd, "drawn": drawn})
        message, expected = sent(copy), kept(copy)
        assert_whole(ForkingPickler.loads(message), expected)
        see = "from tests.support.states import kept; answer = kept(ForkingPickler.loads(message))"
        assert reader.do(see, message) == expected

    def test_tied_tensors_arrive_tied(self, stager, reader) -> None:
        x = torch.arange(6.0)
        message = sent(stager.stage({"a": x, "b": x[2:], "c": [x.view(2, 3)], "d": x.clone()}))
        reader.do("state = ForkingPickler.loads(message); state['a'][3] = 9", message)
        storages = "[x.untyped_storage()._cdata for x in (state['a'], state['b'], state['c'][0])]"
        assert len(set(reader.do(f"answer = {storages}"))) == 1
        assert reader.do("answer = state['b'].tolist(), state['c'][0].tolist(), state['d'].tolist()") == (
            [2.0, 9.0, 4.0, 5.0],
            [[0.0, 1.0, 2.0], [9.0, 4.0, 5.0]],
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        )


class TestLease:
    def test_memory_is_not_lent_again_while_another_process_reads(self, stager, reader) -> None:
        copy = stager.stage(state(1))
        assert reader.do(RECEIVE, sent(copy)) == {"w": [1.0], "v": [1.0]}
        del copy
        for step in range(2, 6):
            stager.stage(state(step))
        assert reader.do("answer = state['w'].unique().tolist()") == [1.0]

    def test_one_slice_in_another_process_keeps_all_of_it(self, reader) -> None:
        block = shared_block()
        part = torch.frombuffer(block.view(), dtype=torch.uint8)[2:9:2]  # any part can be sent
        reader.do("state = ForkingPickler.loads(message)[1:2]", sent(part))
        assert not block.idle
        reader.do("state = None")
        assert block.idle

    def test_a_copy_in_transit_outlives_the_stager(self, stager, reader) -> None:
        message = sent(stager.stage(state(1)))
        for step in range(2, 5):
            stager.stage(state(step))
        stager.close()
        assert reader.do(RECEIVE, message) == {"w": [1.0], "v": [1.0]}

    def test_at_the_bound_stage_waits_for_the_other_process(self, monkeypatch, reader, caplog) -> None:
        stager = stagereg.build("stager", "shared", max_in_flight=1, wait_s=60.0)
        stager.expect_release()
        copy = stager.stage(state(1))
        at = min(x.data_ptr() for x in copy.values())
        reader.do(RECEIVE, sent(copy))
        del copy
        looks: list[bool] = []
        look = shared_memory._SharedFile.revoke

        def let_go_after_three(file: shared_memory._SharedFile) -> bool:
            looks.append(look(file))
            if len(looks) == 3:
                reader.do("state = None")
            return looks[-1]

        monkeypatch.setattr(shared_memory._SharedFile, "revoke", let_go_after_three)
        with caplog.at_level(logging.WARNING, logger="stagereg"):
            again = stager.stage(state(2))
        assert min(x.data_ptr() for x in again.values()) == at, "the memory let go is used again"
        assert looks[:3] == [False] * 3
        assert not [r for r in caplog.records if "still held" in r.getMessage()]
        stager.close()

    def test_a_forked_child_of_a_reader_reads_too(self, reader) -> None:
        block = shared_block()
        reader.do(
            "import os; state = ForkingPickler.loads(message); away, here = os.pipe(); child = os.fork()\n"
            "if not child: os.close(here); os.read(away, 1); os._exit(0)\n"
            "state = None",
            sent(torch.frombuffer(block.view(), dtype=torch.uint8)),
        )
        assert not block.idle
        reader.do("os.close(here); os.close(away); os.waitpid(child, 0)")
        assert block.idle

    def test_a_late_message_is_refused_and_has_no_other_bytes(self, stager, monkeypatch, reader) -> None:
        message = sent(stager.stage(state(1)))
        assert reader.do(RECEIVE + "; state = None", message) == {"w": [1.0], "v": [1.0]}
        stager.stage(state(2))
        assert "received too late" in reader.do(RECEIVE, message), "a second time"
        block = shared_block()
        pool = Pool(max_in_flight=1, wait_s=0.0, make=lambda nbytes, pin, threads: block)
        view = pool.lease().view(pool.take(4096))
        message = sent(torch.frombuffer(view, dtype=torch.uint8))
        del view
        assert pool.in_flight == 1
        monkeypatch.setattr(shared_memory, "_UNRECEIVED_S", -1.0)
        assert pool.in_flight == 0
        assert pool.take(4096).block.address == block.address
        assert "received too late" in reader.do("state = ForkingPickler.loads(message)", message)

    def test_a_killed_process_reads_no_more_and_what_it_sent_stays(self, reader) -> None:
        block, other = shared_block(), Reader()
        registered, message, kept = other.do(
            "import stagereg, stagereg.stagers.shared\n"
            "def count(): return sum('stagereg' in f.__module__ for f in ForkingPickler._extra_reducers.values())\n"
            "before = count(); stager = stagereg.build('stager', 'shared'); registered = before, count() > 0\n"
            "sent = lambda **state: bytes(ForkingPickler.dumps(stager.stage(state)))\n"
            "answer = registered, sent(w=torch.ones(3), v=torch.ones(3)), sent(w=torch.zeros(3))"
        )
        assert registered == (0, True), "the first stager registers how copies are sent, and no import does"
        other.do("state = ForkingPickler.loads(message)", sent(torch.frombuffer(block.view(), dtype=torch.uint8)))
        assert not block.idle
        assert reader.do(RECEIVE, message) == {"w": [1.0], "v": [1.0]}
        other.kill()
        assert block.idle
        assert reader.do("answer = state['w'].tolist()") == [1.0] * 3, "what was received stays"
        assert "its sender is gone" in reader.do(RECEIVE, kept)

    def test_a_forked_child_leaves_the_parents_memory_alone(self) -> None:
        # Run in a process of its own, which may fork since it has run no threads.
        parent = Reader()
        answer = parent.do(
            "import os, stagereg\n"
            "stager = stagereg.build('stager', 'shared', threads=1)\n"
            "copy = stager.stage({'w': torch.ones(1000)}); spare = stager.stage({'w': torch.ones(1000)}); del spare\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    for _ in range(3): stager.stage({'w': torch.zeros(1000)})\n"
            "    stager.close(); del copy; os._exit(0)\n"
            "_, status = os.waitpid(child, 0)\n"
            "next = stager.stage({'w': torch.full((1000,), 3.0)})\n"
            "answer = status, copy['w'].unique().tolist(), next['w'].sum().item()"
        )
        parent.kill()
        assert answer == (0, [1.0], 3000.0)


class TestMemory:
    def test_a_dropped_copy_is_freed_though_a_reader_maps_it(self, reader) -> None:
        def shared_kib() -> list[int]:
            statuses = [Path(f"/proc/{pid}/status").read_text() for pid in ("self", reader.process.pid)]
            return [int(status.split("RssShmem:")[1].split()[0]) for status in statuses]

        stager = stagereg.build("stager", "shared")
        before = shared_kib()
        copy = stager.stage(state(1, n=2**26))  # 256 MiB
        reader.do("state = ForkingPickler.loads(message); state['w'].sum(); state = None", sent(copy))
        assert all(now - then > 200 * 1024 for now, then in zip(shared_kib(), before, strict=True))
        del copy
        stager.close()
        assert all(now - then < 50 * 1024 for now, then in zip(shared_kib(), before, strict=True))

    def test_memory_that_a_finalizer_and_a_new_block_free_at_the_same_time_is_freed(self, monkeypatch) -> None:
        file = shared_block()._file  # the block is gone, and a message was on its way until now
        shared_memory._files.append(file)
        lock = shared_memory._lock_exclusively

        def meanwhile(fd: int) -> bool:
            monkeypatch.undo()
            file.free()
            return lock(fd)

        monkeypatch.setattr(shared_memory, "_lock_exclusively", meanwhile)
        shared_block()
        assert file not in shared_memory._files

    def test_more_than_the_machine_has_is_an_error(self) -> None:
        with pytest.raises(StagingError, match="shared memory"):
            SharedBlock(2**60, pin=False)

    def test_reserved_memory_is_there_for_the_first_stage(self) -> None:
        stager = stagereg.build("stager", "shared", reserve_gb=1 / 64)
        file = shared_memory._file_of(stager.stage(state(1))["w"].data_ptr())
        assert file is not None
        assert file.nbytes == 2**24
        stager.close()

    def test_without_files_in_memory_another_stager_is_named(self, monkeypatch) -> None:
        monkeypatch.delattr(os, "memfd_create")
        with pytest.raises(StagingError, match="needs Linux"):
            SharedBlock(1, pin=False)
