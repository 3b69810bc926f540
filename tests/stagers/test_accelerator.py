"""Accelerator sources: page-locked copies on a side stream, complete and in order when ``stage`` returns."""

from __future__ import annotations

import contextlib
import copy as copies
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stagereg
from stagereg import AsyncStager
from stagereg.errors import StagingError, WrittenWhileStagedError
from stagereg.stagers.overlapped import OverlappedStager

from ..support.states import KINDS, assert_same
from .conftest import MAKERS
from .test_overlapped import Net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine"),
]


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def keep_busy() -> None:
    """Queue work on the current stream that outlasts the calls after it by far."""
    a = torch.randn(4096, 4096, device=device())
    for _ in range(20):
        a = a @ a / 4096


@pytest.mark.parametrize("own_stream", [False, True])
def test_work_queued_before_stage_is_in_the_copy(stager: AsyncStager, own_stream: bool) -> None:
    w = torch.zeros(2**24, device=device())
    torch.accelerator.synchronize()
    with torch.Stream(device()) if own_stream else contextlib.nullcontext():
        keep_busy()
        w.fill_(7)
        before = torch.accelerator.current_stream()
        copy = stager.stage({"w": w})["w"]
        assert torch.accelerator.current_stream() == before
    assert copy.eq(7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_only_kept_memory_is_page_locked_and_used_again(kind: str) -> None:
    stager, w = MAKERS[kind](), torch.ones(2**20, device=device())
    state = {"w": w, "tied": w.view(-1, 2).t(), "c": torch.ones(3)}
    copy = stager.stage(state)
    assert {x.is_pinned() for x in copy.values()} == {kind != "blocking"}
    address = copy["w"].data_ptr()
    del copy
    if kind == "pinned_cached":
        assert stager.stage(state)["w"].data_ptr() == address
    stager.close()


def test_freed_device_memory_is_named(stager: AsyncStager) -> None:
    w = torch.ones(1000, device=device())
    w.untyped_storage().resize_(0)
    with pytest.raises(StagingError, match=r"model\.w"):
        stager.stage({"model": {"w": w}})
    torch.accelerator.synchronize()


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_each_device_has_its_own_stream(stager: AsyncStager) -> None:
    state = {str(i): torch.full((1000,), float(i), device=torch.device(device().type, i)) for i in range(2)}
    copy = stager.stage(state)
    assert copy["0"].eq(0).all()
    assert copy["1"].eq(1).all()


class Run:
    """A model on the accelerator that has trained for a step."""

    def __init__(self, **options: Any) -> None:
        self.net = Net(512, 2048).to(device())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, **options)
        self.inputs = torch.randn(64, 512, device=device())
        self.train()

    def train(self) -> None:
        self.net(self.inputs).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def picture(self) -> dict[str, Any]:
        """Another copy, on the device, queued like any other work."""
        return copies.deepcopy(self.state())


@pytest.fixture
def overlapped() -> Iterator[OverlappedStager]:
    made = stagereg.build("stager", "overlapped")
    yield made
    made.close()


def copied_late(stager: OverlappedStager) -> int:
    assert stager._split is not None
    return sum(region.nbytes for region in stager._split[1].deferred_remote)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_overlapped_has_the_state_of_the_call_as_steps_follow(
    overlapped: OverlappedStager, options: dict[str, bool]
) -> None:
    run = Run(**options)
    run.train()  # the stager has seen the optimizer now
    for _ in range(4):
        keep_busy()
        expected = run.picture()
        promise = overlapped.stage(run.state())
        for _ in range(3):
            run.train()  # whose forward pass writes first, into the averages of the norm
            run.net.norm.running_mean.data.add_(1)
        assert copied_late(overlapped) >= 3 * 2 * 512 * 2048 * 4  # both weights, and two averages of each
        assert_same(promise.result(60), expected)


def test_overlapped_has_it_though_another_stream_steps(overlapped: OverlappedStager) -> None:
    run = Run(fused=True)
    overlapped.watch(run.optimizer)
    torch.accelerator.synchronize()
    keep_busy()
    expected = run.picture()
    promise = overlapped.stage(run.state())
    # It does not wait for the stream above, as an optimizer on a stream of its own may not; but for the copies.
    with torch.Stream(device()):
        run.optimizer.step()
        assert copied_late(overlapped) > 0
        torch.accelerator.current_stream().synchronize()
    assert_same(promise.result(60), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's check for synchronizing calls")
def test_neither_the_call_nor_the_next_step_waits_for_the_device(overlapped: OverlappedStager) -> None:
    run = Run(fused=True)
    run.train()
    for _ in range(3):  # plans and page-locked memory are there, and the kernels are loaded
        promise = overlapped.stage(run.state())
        run.optimizer.step()
        promise.result(60)
        del promise
    state, expected = run.state(), run.picture()
    torch.cuda.synchronize()
    torch.cuda._sleep(2**32)  # cycles: some seconds, of which the calls below need milliseconds
    before = torch.cuda.current_stream().record_event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        promise = overlapped.stage(state)
        assert not before.query(), "stage() has waited for what was queued before it"
        run.optimizer.step()
        assert not before.query(), "the optimizer has waited for the copy on the host"
        assert not promise.done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copied_late(overlapped) > 0
    assert_same(promise.result(60), expected)


def test_an_unannounced_write_on_the_device_is_reported(overlapped: OverlappedStager) -> None:
    run = Run()
    run.train()
    keep_busy()
    promise = overlapped.stage(run.state())
    with torch.no_grad():
        run.net.inner.weight.add_(1)
    failure = promise.exception(60)
    if failure is None:  # it was copied in time after all
        assert not torch.equal(promise.result()["model"]["inner.weight"], run.net.inner.weight.cpu())
    else:
        assert isinstance(failure, StagingError)
        assert "inner.weight" in str(failure)


@pytest.mark.parametrize("nbytes", [2**10, 2**26], ids=["small", "large"])
@pytest.mark.parametrize("write", ["all", "one element"])
def test_a_write_that_moves_no_counter_tears_no_copy(overlapped: OverlappedStager, nbytes: int, write: str) -> None:
    w = torch.nn.Parameter(torch.zeros(nbytes // 4, device=device()))
    optimizer = torch.optim.SGD([w], lr=1.0)
    overlapped.watch(optimizer)
    outcomes = set()
    for turn in range(10):
        keep_busy()
        w.data.fill_(turn)
        promise = overlapped.stage({"w": w.detach()})
        assert copied_late(overlapped) == nbytes
        if write == "all":
            w.data.add_(100)
        else:
            w.data[len(w) // 3] = 100.0
        failure = promise.exception(60)
        outcomes.add(type(failure))
        if failure is None:
            assert promise.result()["w"].eq(turn).all()
        else:
            assert isinstance(failure, StagingError)
            overlapped._all_at_once = False  # so that the next copy is a late one too
            overlapped._observer.expect([])
            overlapped._copies.take_touched()
    assert outcomes == ({type(None)} if nbytes < 2**18 else {WrittenWhileStagedError})


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("options", [{"device_piece_mib": 1}, {"device_rate": 0.5}], ids=str)
def test_a_paced_copy_has_the_state_of_the_call(options: dict[str, Any]) -> None:
    stager = OverlappedStager(**options)
    run = Run(fused=True)
    stager.watch(run.optimizer)
    for steps in (0, 3, 0):
        expected = run.picture()
        future = stager.stage(run.state())
        for _ in range(steps):
            run.train()
        assert_same(future.result(60), expected)
        del future
    stager.close()


@CUDA
def test_no_capture_fails_beside_a_copy(overlapped: OverlappedStager) -> None:
    run, x = Run(), torch.randn(1024, 1024, device=device())
    run.train()
    y = x @ x
    for _ in range(5):  # the first ones page-lock memory
        expected = run.picture()
        future = overlapped.stage(run.state())
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()  # in the mode "global", torch's default
            z = x @ x
            time.sleep(0.05)
            graph.capture_end()
        graph.replay()
        assert_same(future.result(60), expected)
        assert torch.equal(z, y)
        del future
        run.train()


@CUDA
@pytest.mark.parametrize("watched", [False, True])
def test_what_replays_write_after_the_call_is_not_in_the_copy(overlapped: OverlappedStager, watched: bool) -> None:
    run = Run(capturable=True, foreach=True)
    if watched:
        overlapped.watch(run.optimizer)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run.optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run.optimizer.step()
    for _ in range(2):
        expected = run.picture()
        keep_busy()
        future = overlapped.stage(run.state())
        graph.replay()
        graph.replay()
        assert_same(future.result(60), expected)
        del future


def test_thousands_of_small_tensors_are_copied_right(stager: AsyncStager) -> None:
    state = {str(i): torch.full((1 + i % 700,), float(i), device=device()) for i in range(20_000)}
    copy = stager.stage(state)
    assert all(bool(copy[str(i)].eq(float(i)).all()) for i in range(20_000))


@CUDA
def test_packed_views_leave_no_memory_to_the_side_stream() -> None:
    stager = stagereg.build("stager", "pinned_cached")
    big = torch.randn(8192, 4096, device=device())
    state = {str(i): big[:, i * 64 : (i + 1) * 64] for i in range(0, 64, 2)}
    before = torch.cuda.memory_reserved()
    copy = stager.stage(state)
    assert torch.cuda.memory_reserved() - before <= 2**25, "one view has 2 MiB"
    assert all(torch.equal(copy[name], x.cpu()) for name, x in state.items())
    torch.empty(2**21, dtype=torch.uint8, device=device())
    assert torch.cuda.memory_reserved() - before <= 2**25, "the caller's stream uses the memory again"
    stager.close()


def test_a_thread_that_waits_for_a_large_copy_sleeps() -> None:
    stager, state = (
        stagereg.build("stager", "pinned_cached", max_in_flight=1),
        {"w": torch.ones(2**29, device=device())},
    )
    stager.stage(state).clear()
    torch.accelerator.synchronize()
    began, used = time.perf_counter(), time.thread_time()
    copy = stager.stage(state)
    assert time.thread_time() - used <= 0.5 * (time.perf_counter() - began)
    assert copy["w"].eq(1).all()
    stager.close()
