"""``overlapped``: what it copies is the state at the call, whatever writes next; otherwise it raises.

In most tests the background thread is held back, so that nothing is copied in time and the writer must see to it.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stagereg
from stagereg.errors import StagerClosedError, StagingError
from stagereg.stagers.deferred_copy import DeferredCopy
from stagereg.stagers.overlapped import OverlappedStager
from stagereg.testing import run_ranks

WAIT_S = 30.0


class Gate:
    """Holds back every background copy until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        run = DeferredCopy.run

        def held(late: DeferredCopy) -> list[int]:
            assert self._open.wait(WAIT_S)
            return run(late)

        monkeypatch.setattr(DeferredCopy, "run", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def stager(gate: Gate) -> Iterator[OverlappedStager]:
    made = stagereg.build("stager", "overlapped")
    yield made
    gate.open()
    made.close()


class Net(torch.nn.Module):
    """Parameters well above the size that is copied at once, and a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.outer = torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu())


def backward(net: torch.nn.Module) -> None:
    net(torch.randn(8, 64)).square().mean().backward()


def train_step(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    backward(net)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def state_of(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"net": net.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_right_after_the_call_does_not_show(
    name: str, gate: Gate, stager: OverlappedStager, assert_same: Callable[[Any, Any], None]
) -> None:
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    train_step(net, optimizer)  # now it has state, and the stager knows it
    state = state_of(net, optimizer)
    expected = copy.deepcopy(state)
    future = stager.stage(state)
    for _ in range(3):
        train_step(net, optimizer)
    gate.open()
    assert_same(future.result(WAIT_S), expected)
    assert not torch.equal(expected["net"]["inner.weight"], net.inner.weight)


def test_the_call_copies_nothing_that_only_an_optimizer_writes(gate: Gate, stager: OverlappedStager) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    train_step(net, optimizer)
    future = stager.stage(state_of(net, optimizer))
    assert not future.done()
    with torch.no_grad():  # it is not copied yet, so this write is in the copy, and is found
        net.inner.weight.add_(1)
    gate.open()
    with pytest.raises(StagingError, match=r"net\.inner\.weight.*written while it was being copied"):
        future.result(WAIT_S)


def test_tensors_of_no_known_optimizer_are_copied_in_the_call(
    gate: Gate, stager: OverlappedStager, assert_same: Callable[[Any, Any], None]
) -> None:
    net, average = Net(), AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    trained = torch.optim.SGD(net.parameters(), lr=0.1)
    unknown = torch.optim.Adam(average.parameters(), lr=0.1)  # has never stepped
    scheduler = torch.optim.lr_scheduler.StepLR(trained, step_size=1)
    train_step(net, trained)
    loose = torch.randn(100_000)
    state = {
        **state_of(net, trained, unknown),
        "average": average.state_dict(),
        "schedule": scheduler.state_dict(),
        "loose": loose,
        "generator": torch.get_rng_state(),
    }
    expected = copy.deepcopy(state)
    future = stager.stage(state)
    backward(net)  # the running statistics of the norm
    average.update_parameters(net)
    loose.numpy()[:] = 7
    for parameter in average.parameters():
        parameter.data.mul_(3)
    scheduler.step()
    gate.open()
    assert_same(future.result(WAIT_S), expected)


def test_parameters_that_need_no_gradient_are_copied_in_the_call(gate: Gate, stager: OverlappedStager) -> None:
    codebook = torch.nn.Parameter(torch.zeros(100_000), requires_grad=False)  # written by forward, as in a VQ-VAE
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([codebook, weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    future = stager.stage({"codebook": codebook.detach()})
    codebook.data.add_(1)
    gate.open()
    assert future.result(WAIT_S)["codebook"].eq(0).all()


def test_tensors_without_an_optimizer_are_copied_in_the_call(gate: Gate, stager: OverlappedStager) -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    stager.watch(optimizer)
    owned = stager.stage({"w": weight.detach()})
    del optimizer
    gc.collect()
    free = stager.stage({"w": weight.detach()})  # the same memory, and so the same plan
    weight.data.add_(1)
    gate.open()
    assert owned.exception(WAIT_S) is not None
    assert free.result(WAIT_S)["w"].eq(0).all()


def test_several_optimizers_accumulation_and_two_saves_in_flight(
    gate: Gate, stager: OverlappedStager, assert_same: Callable[[Any, Any], None]
) -> None:
    net = Net()
    one = torch.optim.AdamW(net.inner.parameters(), lr=0.1, fused=True)
    other = torch.optim.SGD([*net.norm.parameters(), *net.outer.parameters()], lr=0.1, momentum=0.9)
    train_step(net, one, other)
    promised: list[tuple[Future[Any], Any]] = []
    for _ in range(2):
        state = state_of(net, one, other)
        promised.append((stager.stage(state), copy.deepcopy(state)))
        for _ in range(3):
            backward(net)
        other.step()
        one.step()
    gate.open()
    for future, expected in promised:
        assert_same(future.result(WAIT_S), expected)


def test_a_step_that_the_scaler_skips_leaves_the_copy_for_later(
    gate: Gate, stager: OverlappedStager, assert_same: Callable[[Any, Any], None]
) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train_step(net, optimizer)
    state = {**state_of(net, optimizer), "scaler": scaler.state_dict()}
    expected = copy.deepcopy(state)
    future = stager.stage(state)
    for skipped in (True, False):
        scaler.scale(net(torch.randn(8, 64)).sum()).backward()
        if skipped:
            net.inner.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(net.inner.weight, expected["net"]["inner.weight"]) is skipped
    gate.open()
    assert_same(future.result(WAIT_S), expected)


def test_loading_a_state_dict_in_between_does_not_show(
    gate: Gate, stager: OverlappedStager, assert_same: Callable[[Any, Any], None]
) -> None:
    net, other = Net(), Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    others = torch.optim.Adam(other.parameters(), lr=0.1)
    train_step(net, optimizer)
    train_step(other, others)
    state = state_of(net, optimizer)
    expected = copy.deepcopy(state)
    future = stager.stage(state)
    net.load_state_dict(other.state_dict())
    optimizer.load_state_dict(others.state_dict())
    train_step(net, optimizer)
    gate.open()
    assert_same(future.result(WAIT_S), expected)


def step_with_zero(rank: int, world_size: int) -> None:
    for as_view in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, lr=0.1, fused=True, parameters_as_bucket_view=as_view
        )
        stager = OverlappedStager()
        patch = pytest.MonkeyPatch()
        gate = Gate(patch)
        train_step(net, optimizer)
        state = {"net": net.state_dict(), "shard": optimizer.optim.state_dict()}
        expected = copy.deepcopy(state)
        future = stager.stage(state)
        assert not future.done()
        train_step(net, optimizer)  # other ranks' parameters arrive by broadcasts that move no version counter
        gate.open()
        staged = future.result(WAIT_S)
        for name, x in expected["net"].items():
            assert torch.equal(staged["net"][name], x), name
            assert not torch.equal(net.state_dict()[name], x), name
        for index, slots in expected["shard"]["state"].items():
            for slot, x in slots.items():
                assert torch.equal(staged["shard"]["state"][index][slot], x)
        patch.undo()
        stager.close()


def test_parameters_that_zero_receives_from_ranks_do_not_show() -> None:
    run_ranks(step_with_zero, 2, timeout_s=WAIT_S)


SIDE_DOORS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda p: p.detach().add_(1),
    "one row in place": lambda p: p.detach()[100].add_(1),
    "data": lambda p: p.data.add_(1),
    "numpy": lambda p: p.data.numpy().__iadd__(1),
    "view of data": lambda p: p.data[-1].zero_(),
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),
}


@pytest.mark.parametrize("door", SIDE_DOORS)
def test_a_copy_with_an_unforeseen_write_is_never_handed_out(door: str, gate: Gate, stager: OverlappedStager) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train_step(net, optimizer)
    future = stager.stage(state_of(net, optimizer))
    SIDE_DOORS[door](net.inner.weight)
    gate.open()
    with pytest.raises(StagingError, match=r"net\.inner\.weight"):
        future.result(WAIT_S)
    assert torch.equal(stager.stage(state_of(net)).result(WAIT_S)["net"]["inner.weight"], net.inner.weight)


def reduce_parameters(rank: int, world_size: int) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    stager = OverlappedStager()
    patch = pytest.MonkeyPatch()
    gate = Gate(patch)
    train_step(net, optimizer)
    future = stager.stage(state_of(net))
    version = net.inner.weight._version
    dist.all_reduce(net.inner.weight.data)
    assert net.inner.weight._version == version
    gate.open()
    with pytest.raises(StagingError, match=r"net\.inner\.weight"):
        future.result(WAIT_S)
    patch.undo()
    stager.close()


def leave_join(rank: int, world_size: int) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    stager = OverlappedStager()
    patch = pytest.MonkeyPatch()
    gate = Gate(patch)
    with stagereg.Join([ddp, optimizer]):
        for _ in range(1 + rank):
            train_step(ddp, optimizer)
        future = stager.stage(state_of(net))
        expected = copy.deepcopy(state_of(net))
    gate.open()
    for name, x in expected["net"].items():
        assert torch.equal(future.result(WAIT_S)["net"][name], x), name
    patch.undo()
    stager.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_final_model_that_a_join_sends_does_not_show(world_size: int) -> None:
    run_ranks(leave_join, world_size, timeout_s=WAIT_S)


def test_a_collective_that_moves_no_version_counter_is_reported() -> None:
    run_ranks(reduce_parameters, 2, timeout_s=WAIT_S)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 99_999), verify=st.booleans())
def test_verify_finds_a_single_element_written_by_a_side_door(at: int, verify: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        weight = torch.nn.Parameter(torch.zeros(100_000))
        stager = OverlappedStager(verify=verify)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        stager.watch(optimizer)
        future = stager.stage({"w": weight.detach()})
        weight.data[at] = 1
        gate.open()
        if verify:
            with pytest.raises(StagingError):
                future.result(WAIT_S)
        elif future.exception(WAIT_S) is None:  # not found without it; the copy then has what was written
            assert future.result()["w"].sum() == 1
        stager.close()


def test_a_write_after_the_copying_does_no_harm() -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    stager = OverlappedStager()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    stager.watch(optimizer)
    for value in range(5):
        staged = stager.stage({"w": weight.detach()}).result(WAIT_S)
        weight.data.add_(1)
        assert staged["w"].eq(value).all()
    stager.close()


class TestReportingOfAFailure:
    @pytest.fixture
    def failed(self, gate: Gate, stager: OverlappedStager) -> Future[Any]:
        """A copy that failed, that was not reported yet."""
        weight = torch.nn.Parameter(torch.zeros(100_000))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        stager.watch(optimizer)
        future = stager.stage({"w": weight.detach()})
        weight.data.add_(1)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        gate.open()
        assert done.wait(WAIT_S)
        return future

    def test_the_next_call_raises_it_and_the_one_after_works(
        self, failed: Future[Any], stager: OverlappedStager
    ) -> None:
        with pytest.raises(StagingError, match="'w'"):
            stager.stage({"x": torch.ones(3)})
        assert stager.stage({"x": torch.ones(3)}).result(WAIT_S)["x"].sum() == 3

    def test_synchronize_staging_raises_it(self, failed: Future[Any], stager: OverlappedStager) -> None:
        with pytest.raises(StagingError, match="'w'"):
            stager.synchronize_staging()
        stager.synchronize_staging()

    def test_close_raises_it_when_all_is_closed(self, failed: Future[Any], stager: OverlappedStager) -> None:
        with pytest.raises(StagingError, match="'w'"):
            stager.close()
        stager.close()
        with pytest.raises(StagerClosedError):
            stager.stage({})

    def test_it_is_raised_once(self, failed: Future[Any], stager: OverlappedStager) -> None:
        with pytest.raises(StagingError, match="'w'"):
            failed.result(WAIT_S)
        stager.synchronize_staging()
        stager.stage({}).result(WAIT_S)

    def test_it_keeps_no_memory(self, failed: Future[Any], stager: OverlappedStager) -> None:
        gc.collect()
        assert not [x for x in gc.get_objects() if type(x) is DeferredCopy]
        assert failed.exception() is not None


def test_close_completes_copies_in_flight(gate: Gate, assert_same: Callable[[Any, Any], None]) -> None:
    stager = OverlappedStager()
    weight = torch.nn.Parameter(torch.randn(100_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    stager.watch(optimizer)
    future = stager.stage({"w": weight.detach()})
    assert not future.done()
    gate.open()
    stager.close()
    assert_same(future.result(WAIT_S), {"w": weight.detach()})


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_no_hook_is_left_behind(how: str) -> None:
    hooks, load = len(_global_optimizer_pre_hooks), torch.nn.Module.load_state_dict
    stagers = [OverlappedStager(), OverlappedStager()]
    assert len(_global_optimizer_pre_hooks) == hooks + 2
    assert torch.nn.Module.load_state_dict is not load
    while stagers:
        if how == "closed":
            stagers[-1].close()
        stagers.pop()
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks
    assert torch.nn.Module.load_state_dict is load


def test_the_source_may_be_freed_while_it_is_copied(gate: Gate, stager: OverlappedStager) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train_step(net, optimizer)
    expected = net.inner.weight.detach().clone()
    future = stager.stage(state_of(net))
    del net, optimizer
    gc.collect()
    noise = [torch.full((64, 256), 7.0) for _ in range(100)]
    gate.open()
    assert torch.equal(future.result(WAIT_S)["net"]["inner.weight"], expected)
    assert len(noise) == 100


def test_async_save_of_torch_takes_it(tmp_path: Any) -> None:
    import torch.distributed.checkpoint as dcp

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    stager = OverlappedStager()
    train_step(net, optimizer)
    state = {"net": net.state_dict()}
    expected = copy.deepcopy(state)
    response: Any = dcp.async_save(state, checkpoint_id=tmp_path / "a", async_stager=stager, no_dist=True)
    train_step(net, optimizer)
    response.upload_completion.result(WAIT_S)
    loaded = {"net": {name: torch.zeros_like(x) for name, x in expected["net"].items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    for name, x in expected["net"].items():
        assert torch.equal(loaded["net"][name], x)
    stager.close()
