"""A host that is ahead of its accelerator: the step that the accelerator holds is saved, and nothing else.

:class:`Device` takes the part of an accelerator. It executes queued work only when a test lets it, as an accelerator
that waits in a collective executes nothing. Tensors with dimensions are in its memory, numbers in the host's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagereg.extensions.recovery.end_of_step as end_of_step
import stagereg.extensions.recovery.state_tensors as state_tensors
import stagereg.extensions.recovery.step_snapshot as step_snapshot
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.errors import CheckpointError
from stagereg.extensions.recovery.step_snapshot import StepSnapshot

WRITTEN, CHANGED = "its optimizer had begun the next step", "code other than an optimizer has written"
ABORTED, REPLACED = "a process group may have been aborted", "its optimizer had replaced parts of its state"


class Event:
    def __init__(self) -> None:
        self.complete = False
        self.query: Callable[[], bool] = lambda: self.complete


class Device:
    """A queue of functions and events, and the stream that queues them."""

    def __init__(self) -> None:
        self.queue: list[Any] = []

    def record_event(self) -> Event:
        self.queue.append(Event())
        return self.queue[-1]

    def write(self, x: torch.Tensor, value: Callable[[], Any]) -> None:
        """Queue a write. As on an accelerator, the host changes the version counter at once."""
        torch.autograd.graph.increment_version(x)
        self.queue.append(lambda: x.data.copy_(torch.as_tensor(value())))

    def copy(self, to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        for each, of in zip(to, source, strict=True):
            each.copy_(of) if of.ndim == 0 else self.queue.append(lambda each=each, of=of: each.data.copy_(of.data))

    def run(self, until: object = None) -> None:
        """Execute the queue, up to and including an event or function."""
        while self.queue:
            work = self.queue.pop(0)
            if isinstance(work, Event):
                work.complete = True
            else:
                work()
            if work is until:
                return


class Momentum(torch.optim.Optimizer):
    """Has state in both memories, and a plain number, as optimizers of other libraries."""

    def __init__(self, params: Any, device: Device) -> None:
        super().__init__(params, {"lr": 1.0})
        self.device, self.gradient = device, 1.0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {"step": torch.tensor(0.0), "count": 0, "moment": torch.zeros(3)}
                own, rate = self.state[p], group["lr"]
                own["step"] += 1
                own["count"] += 1
                moment = own["moment"]
                self.device.write(moment, lambda moment=moment: moment.data * 0.5 + self.gradient)
                self.device.write(p, lambda p=p, moment=moment, rate=rate: p.data - rate * moment.data)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("batches", torch.tensor(0))


class Run:
    """A training run that has noted its first step, which the device has executed."""

    def __init__(self, device: Device) -> None:
        self.device, self.model, self.at = device, Net(), 0
        self.optimizer = Momentum(self.model.parameters(), device)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "losses": []}
        self.whole = StepSnapshot(ParameterNames())
        self.expected: list[dict[str, Any]] = []
        self.step()
        device.run()

    def forward(self) -> None:
        self.model.batches += 1
        self.device.write(self.model.mean, lambda: self.model.mean.data + 1)

    def reduce(self) -> object:
        """Queue a collective. Until ``device.run()``, its peer is gone."""
        self.device.queue.append(lambda: None)
        return self.device.queue[-1]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.state["losses"].append(self.at)
        torch.rand(1)

    def note(self) -> None:
        self.at += 1
        self.whole.note(self.at, self.state)

    def step(self) -> object:
        self.forward()
        collective = self.reduce()
        self.update()
        self.note()
        return collective

    def copy(self) -> dict[str, Any]:
        """What is to be saved of this moment, if the device has executed the whole queue."""
        [own] = self.optimizer.state.values()
        return {
            "model": {name: x.tolist() for name, x in self.model.state_dict().items()},
            "moment": own["moment"].tolist(),
            "plain": (own["step"].item(), own["count"], self.optimizer.param_groups[0]["lr"]),
            "losses": [*self.state["losses"]],
            "generator": torch.get_rng_state().numpy().tobytes(),
        }

    def taken(self, until: float = float("inf")) -> dict[str, Any]:
        taken = self.whole.take(0, 2, until)
        own, group = taken["optimizer"]["state"]["weight"], taken["optimizer"]["param_groups"]["weight"]
        return {
            "model": {name: x.tolist() for name, x in taken["model"].items()},
            "moment": own["moment"].tolist(),
            "plain": (own["step"].item(), own["count"], group["lr"]),
            "losses": taken["losses"],
            "generator": taken["stagereg.rng.rank0"]["torch"],
        }


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(state_tensors, "is_on_host", lambda x: x.ndim == 0)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: device)
    monkeypatch.setattr(torch, "_foreach_copy_", device.copy)
    monkeypatch.setattr(torch, "Stream", lambda _: contextlib.nullcontext())
    return device


@pytest.fixture
def run(device: Device) -> Run:
    return Run(device)


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close all snapshots, so that no optimizer waits in another test."""
    made: list[StepSnapshot] = []
    init = StepSnapshot.__init__

    def make(self: StepSnapshot, names: ParameterNames) -> None:
        init(self, names)
        made.append(self)

    monkeypatch.setattr(StepSnapshot, "__init__", make)
    yield
    for each in made:
        each._held = False
        each.close()


@pytest.mark.parametrize("ahead", ["forward", "step", "noted", "two steps"])
def test_a_host_that_is_ahead_does_not_cost_the_step_that_the_accelerator_holds(run: Run, ahead: str) -> None:
    was = run.copy()
    run.forward()
    collective = run.reduce()
    if ahead != "forward":
        run.update()
    if ahead in ("noted", "two steps"):
        run.note()
    if ahead == "two steps":
        run.step()
        run.forward()
    run.device.run(run.device.queue[run.device.queue.index(collective) - 1])  # the forward pass is executed
    assert run.model.mean.tolist() != was["model"]["mean"]
    assert run.whole.hold(0.05) == ""
    assert (run.whole.step, run.taken()) == (1, was)


def test_the_step_that_the_accelerator_has_ended_last_is_saved(run: Run) -> None:
    run.step()
    host, end = run.copy(), run.whole._ends[-1].ended[0]
    run.step()
    run.step()
    run.device.run(end)
    was = run.copy()
    assert run.whole.hold() == ""
    assert run.whole.step == 2
    batches = host["model"].pop("batches")
    assert run.taken() == host | {"moment": was["moment"], "model": was["model"] | {"batches": batches}}


def test_memory_of_copies_is_used_again_but_not_that_of_a_step_that_may_be_saved(run: Run) -> None:
    for _ in range(3):
        run.step()
        run.device.run()
    run.step()
    memory = {each.copies[0].data_ptr() for each in run.whole._ends}
    assert len(memory) == len(run.whole._ends) == 2
    was = run.whole._ends[0].copies[0].tolist()
    for _ in range(20):
        run.step()
    assert len(run.whole._ends) == 4
    assert run.whole._ends[0].copies[0].tolist() == was
    assert run.whole.hold() == ""
    assert run.taken()["model"]["mean"] == was


def test_a_step_that_begins_during_the_copy_is_not_saved(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step()
    assert run.whole.hold() == ""
    stager = end_of_step.build("stager", "blocking")

    def stage(state: Any) -> Any:
        staged = stager.stage(state)
        run.device.run()  # as after an abort
        return staged

    monkeypatch.setattr(end_of_step, "build", lambda *_: SimpleNamespace(stage=stage))
    with pytest.raises(CheckpointError, match="began the next step during the copy"):
        run.taken()


def test_a_host_that_is_far_ahead_keeps_the_step_in_which_the_accelerator_waits_and_names_others(run: Run) -> None:
    was = run.copy()
    ends = []
    for _ in range(8):
        run.step()
        ends.append(run.whole._ends[-1])
    assert run.whole.hold() == ""
    assert run.taken() == was
    run.device.run(ends[1].ended[0])  # is in the fourth step, and the host has forgotten the second and third
    assert run.whole.hold() == "its host had queued more than 4 steps ahead of its accelerator"


def test_an_accelerator_in_the_middle_of_a_step_is_waited_for(run: Run) -> None:
    run.step()
    run.device.run(next(iter(run.whole._ends[0].begun.values())))
    assert run.whole.hold() == WRITTEN
    threading.Timer(0.1, run.device.run).start()
    assert run.whole.hold(10.0) == ""
    assert (run.whole.step, run.taken()) == (2, run.copy())


def test_an_accelerator_that_has_ended_no_step_has_none(device: Device) -> None:
    run = Run.__new__(Run)
    run.device, device.run = device, lambda until=None: None  # type: ignore[method-assign]
    run.__init__(device)  # type: ignore[misc]
    assert run.whole.hold(0.05) == "its accelerator has not finished the step"


@pytest.mark.parametrize("stuck", ["events", "copy"])
def test_a_driver_that_does_not_answer_costs_two_seconds(run: Run, monkeypatch: pytest.MonkeyPatch, stuck: str) -> None:
    began, forever = time.monotonic(), threading.Event()
    if stuck == "events":
        run.whole._ends[0].ended[0].query = forever.wait  # type: ignore[method-assign]
        assert run.whole.hold() == "its accelerator did not answer within 1.0 s"
    else:
        assert run.whole.hold() == ""
        monkeypatch.setattr(end_of_step, "build", lambda *_: SimpleNamespace(stage=lambda _: forever.wait()))
        with pytest.raises(CheckpointError, match="did not answer within"):
            run.taken(time.monotonic() + 0.2)
    assert time.monotonic() - began < 10  # for a machine that is busy
    forever.set()


def abort() -> None:
    dist.ProcessGroup(0, 1).abort()


def test_what_an_abort_leaves_is_not_saved_then_or_later(run: Run) -> None:
    run.step()
    run.optimizer.gradient = float("nan")
    abort()
    run.device.run()
    assert run.whole.hold().startswith(ABORTED)
    run.whole._held = False
    run.step()
    run.device.run()
    run.step()
    assert run.whole.hold().startswith(ABORTED)


def test_an_abort_that_has_not_reached_the_optimizer_leaves_the_last_step(run: Run) -> None:
    was = run.copy()
    run.forward()
    run.reduce()
    run.update()
    abort()
    assert run.whole.hold() == ""
    assert run.taken() == was


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Backend:
    def get_error(self) -> object:
        return SimpleNamespace(name="TIMEOUT")


@pytest.mark.parametrize(("mode", "why"), [(None, ""), ("0", ""), ("1", ABORTED), ("2", ABORTED)])
def test_a_step_may_be_what_the_watchdog_of_nccl_has_aborted(
    run: Run, monkeypatch: pytest.MonkeyPatch, mode: str | None, why: str
) -> None:
    run.step()
    monkeypatch.setattr(step_snapshot, "backends_of", lambda _: [Backend()])
    if mode is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", mode)
    with one_rank():
        run.device.run()
        found = run.whole.hold()
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_a_write_before_the_optimizer_is_found_although_the_optimizer_writes_too(run: Run) -> None:
    run.device.write(run.model.weight, lambda: torch.ones(3))
    run.step()
    assert run.whole.hold().startswith(CHANGED)


def test_a_write_into_a_value_in_host_memory_is_found_behind_a_queued_step(run: Run) -> None:
    history = torch.zeros(1 << 15)
    run.state["history"] = history
    state_tensors.is_on_host = lambda x: x.ndim == 0 or x is history  # type: ignore[assignment]
    run.step()
    run.device.run()
    run.forward()
    run.reduce()
    run.update()
    assert run.whole.hold() == ""
    history += 1
    assert run.whole.hold().startswith(CHANGED)


def replace_state(run: Run) -> None:
    own = run.optimizer.state[run.model.weight]
    own["moment"] = own["moment"] + 1


def add_tensor(run: Run) -> None:
    run.optimizer.state[run.model.weight]["more"] = torch.zeros(3)


def add_number(run: Run) -> None:
    run.optimizer.state["more"] = {"n": 1}  # type: ignore[index]


def drop_tensor(run: Run) -> None:
    del run.optimizer.state[run.model.weight]["step"]


@pytest.mark.parametrize("act", [replace_state, add_tensor, add_number, drop_tensor])
def test_state_that_a_queued_step_has_replaced_is_not_saved(run: Run, act: Callable[[Run], None]) -> None:
    run.forward()
    run.reduce()
    run.update()
    act(run)
    assert run.whole.hold() == ""
    with pytest.raises(CheckpointError, match=REPLACED):
        run.taken()


def test_an_option_that_the_host_changes_as_it_is_taken_is_not_saved(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = end_of_step.entries.capture

    def later(*args: Any) -> dict[str, Any]:
        run.optimizer.param_groups[0]["lr"] = 7.0
        return capture(*args)

    monkeypatch.setattr(end_of_step.entries, "capture", later)
    assert run.whole.hold() == ""
    with pytest.raises(CheckpointError, match=CHANGED):
        run.taken()


@pytest.mark.parametrize("host", ["parameter", "objects"])
def test_an_optimizer_that_writes_on_the_host_has_written_when_it_is_called(
    device: Device, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    run = Run(device)
    if host == "parameter":
        monkeypatch.setattr(
            state_tensors, "is_on_host", lambda x: x.data_ptr() == run.model.weight.data_ptr() or x.ndim == 0
        )
        monkeypatch.setattr(state_tensors, "SMALL_BYTES", 8)
    else:
        run.optimizer.state[run.model.weight]["past"] = [torch.zeros(3)]
    run.whole._seen = None  # looks at the state again
    run.step()
    device.run()
    run.forward()
    assert run.whole.hold() == ""
    run.whole._held = False
    run.reduce()
    run.update()
    assert run.whole.hold() == WRITTEN


def test_an_optimizer_waits_once_the_step_is_held_and_leaves_no_event(run: Run) -> None:
    assert run.whole.hold() == ""
    threading.Thread(target=run.optimizer.step, daemon=True).start()
    ends = time.monotonic() + 5
    while not run.device.queue and time.monotonic() < ends:  # the thread records its event, and waits
        time.sleep(0.001)
    run.device.run()
    assert run.taken() == run.copy()


@pytest.mark.parametrize("announced", [True, False])
def test_an_optimizer_in_a_cuda_graph_is_trusted_if_torch_announces_replays(
    run: Run, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(step_snapshot, "ANNOUNCES_REPLAYS", announced)
    monkeypatch.setattr(step_snapshot, "is_capturing", lambda: True)
    run.whole._before_write()
    monkeypatch.setattr(step_snapshot, "is_capturing", lambda: False)
    assert run.whole.hold() == ("" if announced else "a CUDA graph has captured a step of an optimizer")


def test_a_driver_that_fails_invalidates_the_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.device, "record_event", lambda: 1 / 0)
    run.optimizer.step()
    assert "division" in run.whole.hold()


def test_large_buffers_that_a_broadcast_may_write_are_never_saved(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_tensors, "_DEVICE_BYTES", 4)
    with one_rank():
        found: dict[Any, str] = {}
        for broadcast in (True, False):
            model = DistributedDataParallel(Net())
            model.broadcast_buffers = broadcast
            whole = StepSnapshot(ParameterNames())
            whole.note(1, {"model": model})
            device.run()
            found[broadcast] = whole.hold()
        whole = StepSnapshot(ParameterNames())
        whole.note(1, {"model": model.module})  # may be wrapped outside the state
        device.run()
        found[None] = whole.hold()
        sharded = fully_shard(Net())
        whole = StepSnapshot(ParameterNames())
        whole.note(1, {"model": sharded})
        device.run()
        found["fsdp2"] = whole.hold()
    why = "DistributedDataParallel may broadcast large buffers in each forward pass"
    assert found == {True: why, False: "", None: why, "fsdp2": ""}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA on this machine")
def test_on_a_gpu_a_step_is_saved_from_behind_a_collective_that_hangs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(64, 512, device="cuda")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state, whole = {"model": model, "optimizer": optimizer}, StepSnapshot(ParameterNames())

    def step(seconds: float = 0.0) -> None:
        model(x).square().mean().backward()
        torch.cuda._sleep(int(seconds * 2e9))  # takes the part of the all-reduce: some 10 s
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    for at in (1, 2):
        step()
        whole.note(at, state)
    torch.cuda.synchronize()
    was = {name: value.cpu() for name, value in model.state_dict().items()}
    moments = [own["exp_avg"].cpu() for own in optimizer.state.values()]
    rate = optimizer.param_groups[0]["lr"]
    began = time.monotonic()
    try:
        step(10)
        whole.note(3, state)
        assert whole.hold() == ""
        taken = whole.take(0, 2, time.monotonic() + 5)
        assert time.monotonic() - began < 4
        assert whole.step == 2
        assert not whole._ends[0].has_begun()
        assert all(torch.equal(value, was[name]) for name, value in taken["model"].items())
        found = [*taken["optimizer"]["state"].values()]
        assert all(torch.equal(own["exp_avg"], moment) for own, moment in zip(found, moments, strict=True))
        assert {float(own["step"]) for own in found} == {2.0}
        assert next(iter(taken["optimizer"]["param_groups"].values()))["lr"] == rate
    finally:
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA on this machine")
def test_on_a_gpu_a_full_launch_queue_costs_the_save_at_most() -> None:
    model = torch.nn.Linear(512, 512).cuda()
    whole, small = StepSnapshot(ParameterNames()), torch.zeros(1, device="cuda")
    whole.note(1, {"model": model})
    torch.cuda.synchronize()

    def fill() -> None:
        for _ in range(5000):
            small.add_(1)

    began = time.monotonic()
    try:
        torch.cuda._sleep(int(2e10))  # some 10 s
        threading.Thread(target=fill, daemon=True).start()
        time.sleep(1.0)
        assert whole.hold() in ("", "its accelerator did not answer within 1.0 s")
        assert time.monotonic() - began < 5
    finally:
        torch.cuda.synchronize()
