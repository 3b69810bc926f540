"""``overlapped``: what it copies is the state at the call, whatever writes next; otherwise it raises.

What optimizers write and what is loaded is tried in ``test_interleavings``, in any order. In most tests the background
thread is held back, so that nothing is copied in time and the writer must see to it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stagereg
from stagereg.base.device_copy import DeviceCopy, Source
from stagereg.base.hooks import AFTER_STEPS, BEFORE_STEPS, FREES, LOADS
from stagereg.errors import StagerClosedError, StagingError, WrittenWhileStagedError
from stagereg.stagers.deferred_copy import DeferredCopy
from stagereg.stagers.overlapped import OverlappedStager
from stagereg.testing import run_ranks

from ..support.fake_device import FakeDevice
from ..support.states import assert_same
from .conftest import WAIT_S, held_back


@pytest.fixture
def stager(late) -> OverlappedStager:
    return late[0]


class Net(torch.nn.Module):
    """Parameters well above the size that is copied at once, and a buffer that forward writes."""

    def __init__(self, narrow: int = 64, wide: int = 256) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(narrow, wide)
        self.norm = torch.nn.BatchNorm1d(wide)
        self.outer = torch.nn.Linear(wide, narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu())


class OneWeight:
    """A parameter of an optimizer that the stager knows."""

    def __init__(self, stager: OverlappedStager, value: float = 0.0) -> None:
        self.weight = torch.nn.Parameter(torch.full((100_000,), value))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.state = {"w": self.weight.detach()}
        stager.watch(self.optimizer)


def backward(net: torch.nn.Module) -> None:
    net(torch.randn(8, 64)).square().mean().backward()


def train_step(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    backward(net)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def state_of(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"net": net.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """A model whose optimizer has state, and has stepped twice, so that the stager knows it."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        train_step(net, optimizer)
    return net, optimizer


def test_what_no_known_optimizer_writes_is_copied_in_the_call(gate, stager) -> None:
    net, known = trained()
    average = AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    unknown = torch.optim.Adam(average.parameters(), lr=0.1)  # has never stepped
    scheduler = torch.optim.lr_scheduler.StepLR(known, step_size=1)
    codebook = torch.nn.Parameter(torch.zeros(100_000), requires_grad=False)  # written by forward, as in a VQ-VAE
    known.add_param_group({"params": [codebook]})
    loose = torch.randn(100_000)
    state = {
        **state_of(net, known, unknown),
        "average": average.state_dict(),
        "schedule": scheduler.state_dict(),
        "loose": loose,
        "codebook": codebook.detach(),
        "generator": torch.get_rng_state(),
    }
    expected = copy.deepcopy(state)
    future = stager.stage(state)
    backward(net)  # the running statistics of the norm
    average.update_parameters(net)
    loose.numpy()[:] = 7
    for parameter in (*average.parameters(), codebook):
        parameter.data.mul_(3).add_(1)
    scheduler.step()
    gate.set()
    assert_same(future.result(WAIT_S), expected)


def test_tensors_whose_optimizer_is_gone_are_copied_in_the_call(gate, stager) -> None:
    one = OneWeight(stager)
    owned = stager.stage(one.state)
    del one.optimizer
    gc.collect()
    free = stager.stage(one.state)  # the same memory, and so the same plan
    one.weight.data.add_(1)
    gate.set()
    assert owned.result(WAIT_S)["w"].eq(0).all(), "the second call has completed the first copy"
    assert free.result(WAIT_S)["w"].eq(0).all()


def step_with_zero(as_view: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=0.1, fused=True, parameters_as_bucket_view=as_view
    )
    with held_back() as (stager, gate):
        train_step(net, optimizer)
        state = {"net": net.state_dict(), "shard": optimizer.optim.state_dict()["state"]}
        expected = copy.deepcopy(state)
        future = stager.stage(state)
        assert not future.done()
        train_step(net, optimizer)  # other ranks' parameters arrive by broadcasts that move no version counter
        gate.set()
        assert_same(future.result(WAIT_S), expected)
        assert not any(torch.equal(net.state_dict()[name], x) for name, x in expected["net"].items())


def reduce_parameters() -> None:
    net, optimizer = trained()
    with held_back() as (stager, gate):
        stager.watch(optimizer)
        future = stager.stage(state_of(net))
        version = net.inner.weight._version
        dist.all_reduce(net.inner.weight.data)
        assert net.inner.weight._version == version
        gate.set()
        with pytest.raises(StagingError, match=r"net\.inner\.weight"):
            future.result(WAIT_S)


def leave_join(rank: int) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with held_back() as (stager, gate):
        with stagereg.Join([ddp, optimizer]):
            for _ in range(1 + rank):
                train_step(ddp, optimizer)
            future = stager.stage(state_of(net))
            expected = copy.deepcopy(state_of(net))
        gate.set()
        assert_same(future.result(WAIT_S), expected)


def write_on_ranks(rank: int, world_size: int) -> None:
    for as_view in (False, True):
        step_with_zero(as_view)
    reduce_parameters()
    leave_join(rank)


def test_zero_and_joins_do_not_show_other_collectives_do() -> None:
    run_ranks(write_on_ranks, 2, timeout_s=2 * WAIT_S)


SIDE_DOORS: dict[str, Callable[[torch.nn.Parameter, dict[str, Any]], object]] = {
    "in place": lambda p, state: p.detach().add_(1),
    "one row in place": lambda p, state: p.detach()[100].add_(1),
    "data": lambda p, state: p.data.add_(1),
    "numpy": lambda p, state: p.data.numpy().__iadd__(1),
    "view of data": lambda p, state: p.data[-1].zero_(),
    "foreach": lambda p, state: torch._foreach_add_([p.data], 1.0),
    "momentum": lambda p, state: state["momentum_buffer"].add_(1),
}


@pytest.mark.parametrize("door", SIDE_DOORS)
def test_a_copy_with_an_unforeseen_write_is_never_handed_out(door: str, gate, stager) -> None:
    net, optimizer = trained()
    future = stager.stage(state_of(net, optimizer))
    assert not future.done()
    weight = net.inner.weight
    SIDE_DOORS[door](weight, optimizer.state[weight])  # it is not copied yet, so this write would be in the copy
    gate.set()
    where = r"optimizers\.0\.state\.0\.momentum_buffer" if door == "momentum" else r"net\.inner\.weight"
    with pytest.raises(StagingError, match=f"{where}.*written, freed or resized while it was"):
        future.result(WAIT_S)
    assert torch.equal(stager.stage(state_of(net)).result(WAIT_S)["net"]["inner.weight"], weight)


@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 99_999), verify=st.booleans())
def test_verify_finds_a_single_element_written_by_a_side_door(at: int, verify: bool) -> None:
    with held_back(verify=verify) as (stager, gate):
        one = OneWeight(stager)
        future = stager.stage(one.state)
        one.weight.data[at] = 1
        gate.set()
        if verify:
            with pytest.raises(StagingError):
                future.result(WAIT_S)
        elif future.exception(WAIT_S) is None:  # not found without it; the copy then has what was written
            assert future.result()["w"].sum() == 1


@pytest.fixture
def failed(gate, stager) -> Future[Any]:
    """A copy that failed, that was not reported yet."""
    one = OneWeight(stager)
    future = stager.stage(one.state)
    one.weight.data.add_(1)
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    gate.set()
    assert done.wait(WAIT_S)
    return future


@pytest.mark.parametrize("call", ["stage", "synchronize_staging", "close"])
def test_the_next_call_raises_a_failure_once(call: str, failed: Future[Any], stager) -> None:
    arguments = [{}] if call == "stage" else []
    with pytest.raises(StagingError, match="'w'"):
        getattr(stager, call)(*arguments)
    if call == "close":
        stager.close()
        with pytest.raises(StagerClosedError):
            stager.stage({})
    else:
        stager.synchronize_staging()
        assert stager.stage({"x": torch.ones(3)}).result(WAIT_S)["x"].sum() == 3


def test_a_failure_keeps_no_memory_and_is_not_raised_twice(failed: Future[Any], stager) -> None:
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is DeferredCopy]
    with pytest.raises(StagingError, match="'w'"):
        failed.result(WAIT_S)
    stager.synchronize_staging()
    stager.stage({}).result(WAIT_S)


def test_what_interrupts_a_step_is_raised_there_and_nothing_hangs(gate, stager) -> None:
    one = OneWeight(stager)
    future = stager.stage(one.state)
    (running,) = stager._copies._running
    (piece,) = running._task._pieces

    def interrupted(base: int) -> None:
        piece(base)
        raise KeyboardInterrupt

    running._task._pieces[0] = interrupted
    one.weight.grad = torch.ones_like(one.weight)
    with pytest.raises(KeyboardInterrupt):
        one.optimizer.step()
    assert one.weight.eq(0).all()
    stager._copies.finish_before_write()  # what close() does first: the interrupt is not raised again
    gate.set()
    with pytest.raises(StagingError, match=r"the copy was interrupted \(KeyboardInterrupt\(\)\)"):
        stager.close()
    assert future.done()


def test_a_call_that_was_interrupted_leaves_nothing_to_wait_for(stager, monkeypatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stager._thread, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stager.stage({"x": torch.ones(3)})
    stager.synchronize_staging()


def test_whatever_ends_the_background_copy_ends_its_future(stager, monkeypatch) -> None:
    monkeypatch.setattr(DeferredCopy, "run", lambda late: sys.exit(3))
    future = stager.stage({"x": torch.ones(3)})
    assert isinstance(future.exception(WAIT_S), StagingError)


def test_a_copy_cannot_be_cancelled(gate, stager) -> None:
    future = stager.stage({"x": torch.ones(3)})
    assert not future.cancel()
    gate.set()
    stager.close()
    assert future.result(WAIT_S)["x"].sum() == 3


def test_every_reader_of_a_future_gets_the_same_copy(gate, stager) -> None:
    future = stager.stage({"x": torch.ones(3)})
    assert future._result is None
    gate.set()
    stager.synchronize_staging()
    together = threading.Barrier(3)

    def read(reader: Callable[[], Any]) -> Any:
        together.wait(WAIT_S)
        return reader()

    with ThreadPoolExecutor(3) as readers:  # the last one as asyncio of Python 3.14 reads it
        one, other, third = readers.map(read, [future.result, future.result, lambda: future._result])
    assert one is other is third
    assert one["x"].sum() == 3


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])  # the plain one is recognised the second time
def test_a_complete_copy_holds_its_source_no_longer(kind: type[torch.Tensor], gate, stager) -> None:
    gate.set()
    state = {"w": torch.ones(100_000), "all": [torch.ones(3)], "some": [1, {"x": kind(torch.ones(3)), "one": 1}]}
    expected = copy.deepcopy(state)
    sources = [weakref.ref(x) for x in (state["w"], state["all"][0], state["some"][1]["x"])]
    futures = [stager.stage(state) for _ in range(2)]
    stager.synchronize_staging()
    stager._thread.submit(int).result(WAIT_S)  # the background thread has let go of its last arguments
    state.clear()
    assert [source() for source in sources] == [None] * 3
    for future in futures:
        assert_same(future.result(WAIT_S), expected)


def test_no_hook_is_left_behind() -> None:
    def counts() -> list[int]:
        return [len(each._hooks) for each in (BEFORE_STEPS, AFTER_STEPS, LOADS, FREES)]

    def methods() -> list[Any]:
        return [torch.nn.Module.load_state_dict, torch.UntypedStorage.resize_, torch.Tensor.resize_]

    gc.collect()  # of stagers that other tests have dropped
    before, torchs = counts(), methods()
    closed, dropped = OverlappedStager(), OverlappedStager()
    both = counts()
    assert all(one < other for one, other in zip(before, both, strict=True))
    if before[2:] == [0, 0]:  # otherwise a stager of another test still has hooks
        assert all(one != other for one, other in zip(torchs, methods(), strict=True))
    closed.close()
    assert all(one < other for one, other in zip(counts(), both, strict=True))
    del dropped
    gc.collect()
    assert (counts(), methods()) == (before, torchs)


def test_a_stager_that_the_garbage_collector_finds_within_a_step_does_not_fail_the_step() -> None:
    """torch iterates over its hooks then, so no hook may be removed from them."""
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=1.0)
    w.grad = torch.ones(3)
    found = []

    def collect(*_: Any) -> None:
        stager = OverlappedStager()
        stager.cycle = stager  # type: ignore[attr-defined]
        found.append(weakref.ref(stager))
        del stager
        gc.collect()

    with contextlib.ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(collect).remove)
        hooks.callback(register_optimizer_step_post_hook(collect).remove)
        hooks.callback(OverlappedStager().close)  # its hooks come after those that remove a hook
        optimizer.step()
    assert [each() for each in found] == [None] * 2
    assert w.tolist() == [0.0] * 3


def test_the_source_may_be_freed_while_it_is_copied(gate, stager) -> None:
    net, optimizer = trained()
    expected = net.inner.weight.detach().clone()
    future = stager.stage(state_of(net))
    del net, optimizer
    gc.collect()
    noise = [torch.full((64, 256), 7.0) for _ in range(100)]
    gate.set()
    assert torch.equal(future.result(WAIT_S)["net"]["inner.weight"], expected)
    assert len(noise) == 100


def test_copies_from_a_device_are_queued_by_whoever_comes_first(
    fake_device: FakeDevice, late: tuple[OverlappedStager, threading.Event]
) -> None:
    stager, gate = late
    one = OneWeight(stager, 1.0)
    for writes in (True, False):
        fake_device.log.clear()
        gate.clear()
        before = one.weight.detach().clone()
        promise = stager.stage(one.state)
        in_call = [("main", "records", 0), ("side", "waits for", "main", 0)]
        assert fake_device.log == in_call, "behind what was queued before the call, and no copy is queued in it"
        if writes:
            one.weight.grad = torch.ones_like(one.weight)
            one.optimizer.step()
            queued = [("side", "is entered by", "MainThread")] * 2 + [("side", "records", 4)]
            assert fake_device.log == [*in_call, *queued, ("main", "waits for", "side", 4)]
            assert not torch.equal(one.weight, before)
        gate.set()
        assert torch.equal(promise.result(WAIT_S)["w"], before)
        if not writes:
            queued = [("side", "is entered by", "stagereg-copy-deferred")] * 2 + [("side", "records", 4)]
            assert fake_device.log == [*in_call, *queued]


@pytest.mark.parametrize("elements", [100, 2**17])
def test_of_a_device_no_write_that_moves_no_counter_is_in_a_copy(
    fake_device: FakeDevice, late: tuple[OverlappedStager, threading.Event], elements: int
) -> None:
    stager, gate = late
    weight = torch.nn.Parameter(torch.ones(elements))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stager.watch(optimizer)
    promise = stager.stage({"w": weight.detach()})
    weight.data[elements // 3] = 7.0
    gate.set()
    if elements == 100:
        assert torch.equal(promise.result(WAIT_S)["w"], torch.ones(elements))
    else:
        with pytest.raises(WrittenWhileStagedError, match="w"):
            promise.result(WAIT_S)
        assert promise.seen


def test_a_state_with_small_tensors_is_copied_from_inference_mode_too(
    fake_device: FakeDevice, late: tuple[OverlappedStager, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    stager, gate = late
    gate.set()
    monkeypatch.setattr("stagereg.stagers.device_sources.BUFFER_BYTES", 0)  # so that the thread gathers them
    weights = [torch.nn.Parameter(torch.full((5,), float(i))) for i in range(9)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    stager.watch(optimizer)
    with torch.inference_mode():
        future = stager.stage({"w": [w.detach() for w in weights]})
        copy = future.result(WAIT_S)["w"]
    assert [each.tolist() for each in copy] == [[float(i)] * 5 for i in range(9)]


def test_a_copy_that_cannot_be_queued_fails_its_future_alone(
    fake_device: FakeDevice,
    late: tuple[OverlappedStager, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stager, gate = late
    one = OneWeight(stager, 1.0)
    copied = DeviceCopy._copy

    def copy_some(copy: DeviceCopy, source: Source) -> None:
        copied(copy, source)
        raise RuntimeError("no memory left")

    monkeypatch.setattr(DeviceCopy, "_copy", copy_some)
    future = stager.stage(one.state)
    fake_device.done.clear()
    one.weight.grad = torch.ones_like(one.weight)
    one.optimizer.step()
    assert fake_device.log[-2][:2] == ("side", "records")
    assert fake_device.log[-1] == ("main", "waits for", "side", len(fake_device.log) - 2)
    gate.set()
    assert fake_device.queried.wait(WAIT_S)
    assert not future.done(), "the memory is used again when nothing writes to it any more"
    assert stager._copier.pool.in_flight == 1
    fake_device.done.set()
    with pytest.raises(RuntimeError, match="no memory left"):
        stager.close()
    assert future.done()
    with pytest.raises(StagerClosedError):
        stager.stage({})
