"""Bytes arrive where they belong, whichever of the ways to copy there is: compiled, or with the C library alone."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.kernel.compiled as compiled
import stagereg.kernel.transfer as transfer
from stagereg.errors import StagingError
from stagereg.kernel.transfer import Batch, CopyEngine, CopyTask, piece

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "stagereg" / "kernel" / "copy.c"


WAIT_S = 30.0
NAME = f"_copy{sysconfig.get_config_var('EXT_SUFFIX')}"

# What makes the compiled part take a processor for a lesser one, and what it then copies with.
PROCESSORS = {
    "compiled": ([], None),
    "compiled, AVX2": (["-D__builtin_cpu_supports(name)=(name[3]=='2')"], "AVX2 streaming stores"),
    "compiled, neither": (["-D__builtin_cpu_supports(name)=0"], "memcpy"),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The compiled part, compiled here, for each of the processors."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    found: dict[str, ctypes.CDLL] = {}
    for processor, (flags, _) in PROCESSORS.items():
        made = tmp_path_factory.mktemp("compiled") / NAME
        command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, timeout=60)
        found[processor] = library = ctypes.CDLL(str(made))
        library.stagereg_copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        library.stagereg_copy_way.restype = ctypes.c_char_p
    return found


@pytest.fixture(params=[*PROCESSORS, "memmove"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the ways to copy many pieces."""
    copy = None
    if request.param in PROCESSORS:
        library, (_, name) = request.getfixturevalue("libraries")[request.param], PROCESSORS[request.param]
        copy = library.stagereg_copy
        if request.param == "compiled, AVX2" and "avx2" not in Path("/proc/cpuinfo").read_text().split():
            pytest.skip("needs a processor with AVX2")
        assert name in (None, library.stagereg_copy_way().decode())
    monkeypatch.setattr(compiled, "copy", copy)
    return request.param


def moved(sizes: list[int], gaps: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]:
    """A source, what an empty block becomes by moves of these sizes with gaps between them on both sides, and those."""
    runs = list(zip(sizes, gaps, gaps[::-1], strict=True))
    source = torch.randint(1, 256, (sum(sizes) + sum(gaps),), dtype=torch.uint8)
    expected, moves = torch.zeros_like(source), []
    to = at = 0
    for nbytes, before, other in runs:
        to, at = to + before, at + other
        expected[to : to + nbytes] = source[at : at + nbytes]
        moves.append((to, source.data_ptr() + at, nbytes))
        to, at = to + nbytes, at + nbytes
    return source, expected, moves


SIZES = st.one_of(st.integers(0, 200), st.integers(500, 5000), st.integers(60_000, 600_000))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 130)), max_size=40), st.integers(0, 1100), st.integers(1, 3))
def check_moves(runs: list[tuple[int, int]], more: int, threads: int) -> None:
    runs = [*runs, *[(at % 90, at % 7) for at in range(more)]]
    source, expected, moves = moved([nbytes for nbytes, _ in runs], [gap for _, gap in runs])
    engine, batch = CopyEngine(threads), Batch(moves)
    for _ in range(2):  # the second time with what was remembered
        to = torch.zeros_like(source)
        engine.run(to.data_ptr(), batch.pieces(threads)).finish()
        assert torch.equal(to, expected)
    to = torch.zeros_like(source)
    piece(moves)(to.data_ptr())
    assert torch.equal(to, expected)
    engine.close()


def test_every_byte_arrives_and_nothing_else_is_touched(way: str) -> None:
    check_moves()


def test_each_alignment_of_both_sides_is_copied(way: str) -> None:
    source, target = torch.randint(1, 256, (2000,), dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
    data, found = source.numpy().tobytes(), target.numpy()
    for at in range(65):
        for to in range(65):
            for nbytes in (511, 512, 513, 575, 1201):
                found.fill(0)
                piece([(to, source.data_ptr() + at, nbytes)])(target.data_ptr())
                assert found.tobytes() == bytes(to) + data[at : at + nbytes] + bytes(2000 - to - nbytes)


def test_threads_get_equal_shares_of_the_bytes() -> None:
    moves = [(at * 1000, at * 1000, nbytes) for at, nbytes in enumerate([700, 1, 0, 650, 3, 999])]
    shares = transfer._split(moves, 3)
    assert [sum(nbytes for *_, nbytes in share) for share in shares] == [785, 785, 783]
    assert transfer._split([], 2) == [[], []]


class InterruptedDeque(deque[Any]):
    """Where a Ctrl-C comes as a piece has been taken, and before it is worked on."""

    def popleft(self) -> Any:
        super().popleft()
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["in a piece", "between two"])
def test_an_interrupt_is_raised_once_and_others_get_an_error(at: str) -> None:
    def interrupted(base: int) -> None:
        raise KeyboardInterrupt

    worked: list[int] = []
    task = CopyTask(7, [worked.append, interrupted, worked.append])
    if at == "between two":
        task = CopyTask(7, [worked.append, worked.append])
        task._pieces = InterruptedDeque(task._pieces)
    with pytest.raises(KeyboardInterrupt):
        task.finish()
    assert worked == ([7] if at == "in a piece" else [])
    with pytest.raises(StagingError, match=r"interrupted \(KeyboardInterrupt\(\)\)"):
        task.finish()


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_a_task_ends_when_no_thread_works_on_it_any_more(raised: type[BaseException]) -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(base: int) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        ended.set()

    def fails(base: int) -> None:
        assert begun.wait(WAIT_S)
        threading.Timer(0.05, go.set).start()
        raise raised

    engine = CopyEngine(2)
    task = engine.run(0, [slow, fails])
    assert begun.wait(WAIT_S)
    with pytest.raises(raised):
        task.finish()
    assert ended.is_set(), "the memory may be used for something else"
    engine.close()


def test_memory_lives_as_long_as_a_thread_works_on_it() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(base: int) -> None:
        begun.set()
        assert go.wait(WAIT_S)

    engine, memory = CopyEngine(2), torch.empty(3)
    alive = weakref.ref(memory)
    engine.run(0, [slow, slow], memory)  # by a caller that is interrupted before it has finished the task
    assert begun.wait(WAIT_S)
    del memory
    assert alive() is not None
    go.set()
    engine.close()
    assert alive() is None


LOADED = """
import json, sys, stagereg.kernel.compiled as compiled
print(json.dumps([compiled.way, [line.split()[-1] for line in open("/proc/self/maps") if "_copy" in line]]))
"""


@pytest.mark.parametrize("beside", ["nothing", "the compiled part", "that of another Python", "no library"])
def test_it_is_loaded_from_beside_the_package_only(
    beside: str, libraries: dict[str, ctypes.CDLL], tmp_path: Path
) -> None:
    library = libraries["compiled"]._name
    site, here = tmp_path / "site", tmp_path / "here"
    shutil.copytree(ROOT / "stagereg", site / "stagereg", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    here.mkdir()
    for name in (NAME, f"stagereg/kernel/{NAME}"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, here / name)
    own = site / "stagereg" / "kernel" / NAME
    if beside == "the compiled part":
        shutil.copy(library, own)
    elif beside == "that of another Python":
        shutil.copy(library, own.with_name("_copy.cpython-399-x86_64-linux-gnu.so"))
    elif beside == "no library":
        own.write_text("something else")
    environment = {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(here)}
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=here, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    way, files = json.loads(done.stdout)
    assert set(files) == ({str(own)} if beside == "the compiled part" else set())
    assert bool(way) == (beside == "the compiled part")
