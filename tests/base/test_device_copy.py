"""Copies from an accelerator: every byte arrives, in few calls, and no memory is used again before its copy is done."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import stagereg.base.device_copy as device_copy
from stagereg.base.capture import relaxed_capture
from stagereg.base.device_copy import DeviceCopy, Packed, Source, await_event, gathered
from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool

from ..support.fake_device import FakeDevice, FakeEvent
from ..support.states import assert_same

WAIT_S = 30.0


class Calls(TorchDispatchMode):
    """Counts the calls of each operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def tiny_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_copy, "_SMALL_BYTES", 100)
    patch.setattr(device_copy, "BUFFER_BYTES", 300)
    patch.setattr(device_copy, "LOCKED_BYTES", 128)


def sources_of(sizes: list[tuple[int, int]]) -> tuple[list[Source], int]:
    """Sources of these sizes in bytes, each after an empty space of as many cache lines."""
    found, end = [], 0
    for nbytes, skipped in sizes:
        offset = -(-end // 64) * 64 + 64 * skipped
        found.append(Source(offset, torch.randint(1, 256, (nbytes,), dtype=torch.uint8)))
        end = offset + nbytes
    return found, end


@given(
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0, 0, 0, 1, 3])), min_size=1, max_size=30),
    st.sampled_from([None, 64, 100, 1000]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_byte_arrives_and_no_copy_crosses_the_end_of_a_locked_piece(
    sizes: list[tuple[int, int]], piece_bytes: int | None, with_view: bool, random: Any
) -> None:
    sources, end = sources_of(sizes)
    strided = torch.arange(600, dtype=torch.int32).view(20, 30)[:, ::7].t()
    at = -(-end // 64) * 64
    packed = [Packed(at, strided, torch.empty_like(strided).stride())] if with_view else []
    block = bytearray(at + 4000)
    written: list[range] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].dtype is torch.uint8:
                start = args[0].data_ptr() - base
                written.append(range(start, start + args[0].numel()))
            return func(*args, **(kwargs or {}))

    base = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
    with pytest.MonkeyPatch.context() as patch:
        tiny_limits(patch)
        steps = DeviceCopy(memoryview(block), sources, packed, piece_bytes).steps
        random.shuffle(steps)
        with Copies():
            for step in steps:
                step.queue()
    for offset, data in sources:
        assert block[offset : offset + data.numel()] == data.numpy().tobytes()
    for offset, view, stride in packed:
        there = torch.frombuffer(block, dtype=view.dtype, offset=offset, count=view.numel())
        assert torch.equal(there.as_strided(view.shape, stride), view)
    ours = [each for each in written if 0 <= each.start < len(block)]
    assert {each.start // 128 == each[-1] // 128 for each in ours} == {True}
    covered = Counter(at for each in ours for at in each)
    assert covered.most_common(1)[0][1] == 1, "no byte is copied twice"
    assert sum(step.nbytes for step in steps) >= sum(data.numel() for _, data in sources)


def mixed_state() -> dict[str, Any]:
    big = torch.randn(300, 4000)
    tied = torch.randn(100)
    return {
        "small": [torch.full((7 + i % 5,), float(i)) for i in range(200)],
        "scalars": [torch.tensor(float(i), dtype=torch.bfloat16) for i in range(20)],
        "large": big,
        "row": big[3],
        "columns": [big.t()[i] for i in range(3)],
        "holed": [torch.randn(64, 4000)[:, i : i + 5] for i in range(4)],
        "tied": [tied, tied, tied[10:20]],
        "complex": torch.randn(4, dtype=torch.complex64).conj(),
        "other": (1, "text"),
    }


@pytest.mark.parametrize("room", [True, False], ids=["buffer", "no memory for a buffer"])
def test_a_copy_equals_the_state_on_the_device(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    if not room:
        monkeypatch.setattr(device_copy, "_allocate", lambda *sizes: None)
    state, copier = mixed_state(), HostCopier(Pool())
    for _ in range(2):
        copy = copier.copy(state)
        assert_same(copy, state)
        del copy
    copier.close()


def test_thousands_of_small_tensors_are_copied_in_a_few_calls(fake_device: FakeDevice) -> None:
    copier, state = HostCopier(Pool()), [torch.full((64,), float(i)) for i in range(5000)]
    with Calls() as calls:
        copy = copier.copy(state)
    assert calls.counts["copy_"] <= 2
    assert all(map(torch.equal, copy, state))


def test_temporary_memory_on_the_device_belongs_to_the_callers_stream(fake_device: FakeDevice) -> None:
    copier = HostCopier(Pool())
    state = {str(i): torch.randn(64, 4000)[:, i : i + 5] for i in range(4)} | {"a": torch.ones(9), "b": torch.ones(9)}
    with Calls() as calls:
        copier.copy(state)
    assert fake_device.allocated == [("main", 64 * 5 * 4)], "one buffer, as large as the largest view"
    assert calls.counts["clone"] == 0


def test_two_threads_that_queue_steps_do_not_mix_the_contents_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(group: list[Source], into: torch.Tensor) -> torch.Tensor:
        found = gathered(group, into)
        time.sleep(0.002)
        return found

    tiny_limits(monkeypatch)
    monkeypatch.setattr(device_copy, "gathered", slowly)
    sources, end = sources_of([(90, 0)] * 40)
    block = bytearray(end)
    steps = DeviceCopy(memoryview(block), sources).steps
    assert len(steps) > 10
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(lambda step: step.queue(), steps)] == [None] * len(steps)
    assert all(block[offset : offset + 90] == data.numpy().tobytes() for offset, data in sources)


@pytest.mark.parametrize("fails", ["a copy on the device", "a copy in host memory", "nothing"])
def test_memory_is_leased_again_only_after_the_device_has_written_it(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    copier = HostCopier(Pool())
    if fails == "a copy on the device":
        copied = DeviceCopy._copy
        left = iter([True, False])

        def copy(self: DeviceCopy, source: Source) -> None:
            copied(self, source)
            if not next(left):
                raise RuntimeError("the device is lost")

        monkeypatch.setattr(DeviceCopy, "_copy", copy)
    elif fails == "a copy in host memory":

        class Failing:
            def finish(self) -> None:
                raise RuntimeError("the device is lost")

        monkeypatch.setattr(copier.engine, "run", lambda *args: Failing())
    fake_device.done.clear()
    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(copier.copy, {"a": torch.ones(2**17), "b": torch.ones(2**17)})
        assert fake_device.queried.wait(WAIT_S)
        time.sleep(0.02)
        assert not copying.done()
        assert copier.pool.in_flight == 1
        fake_device.done.set()
        error = copying.exception(WAIT_S)
    assert (error is None) == (fails == "nothing")


def test_a_thread_that_waits_for_the_device_sleeps(fake_device: FakeDevice) -> None:
    event = FakeEvent(fake_device, "side", 0)
    fake_device.done.clear()
    threading.Timer(0.4, fake_device.done.set).start()
    began = time.thread_time()
    await_event(event)
    assert fake_device.done.is_set()
    assert time.thread_time() - began < 0.2, "processor seconds of 0.4 s"


class Modes(threading.local):
    """The capture mode of each thread, as the CUDA driver keeps it."""

    mode = 0

    def exchange(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0


@pytest.fixture
def modes(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Returns the modes in which threads called the device, after the name of the call."""
    modes, found = Modes(), list[tuple[str, int]]()
    monkeypatch.setattr("stagereg.base.capture._exchange", lambda: modes.exchange)

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            found.append((name, modes.mode))
            return call(*args)

        return noted

    monkeypatch.setattr(FakeEvent, "query", noting("query", FakeEvent.query))
    monkeypatch.setattr(DeviceCopy, "_copy", noting("copy", DeviceCopy._copy))
    yield found
    assert modes.mode == 0


def test_copies_and_waits_spare_a_graph_that_another_thread_captures(modes: list[tuple[str, int]]) -> None:
    HostCopier(Pool()).copy({"a": torch.ones(2**17)})
    assert modes
    assert {mode for _, mode in modes} == {2}, "relaxed"
    assert {name for name, _ in modes} == {"query", "copy"}
    with relaxed_capture():
        pass


def test_a_copy_that_would_become_part_of_a_graph_is_refused(fake_device: FakeDevice) -> None:
    copier = HostCopier(Pool())
    fake_device.capturing = True
    with pytest.raises(StagingError, match="captures a CUDA graph"):
        copier.copy({"a": torch.ones(3)})
    fake_device.capturing = False
    assert copier.copy({"a": torch.ones(3)})["a"].eq(1).all()
