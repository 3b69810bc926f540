"""Training, staging, reading and dropping in any order: every byte of every copy is what the state was at ``stage``.

The programs are generated. The state is that of a small training run: parameters and optimizer state (large enough that
``overlapped`` copies them late), buffers that forward writes, averages of the weights, scalars of a schedule.
Readers take their copies piece by piece, on this thread between any two steps, or all at once on another.

``overlapped`` may answer a write that bypasses optimizers with an error instead of a copy, and only then. It is also
tried with its background thread held back until somebody asks for a copy, so that each write finds all still to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from stagereg.errors import StagingError
from stagereg.stagers.deferred_copy import DeferredCopy

from ..support.examples import examples
from ..support.states import KINDS, LOCK_TIMEOUT_S, Piece, assert_whole, build, kept, pieces, same, settled

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
}


@dataclass
class Held:
    """A copy that a reader holds, or its future; the reader may be a writer on another thread."""

    staged: Any
    expected: list[Piece]
    read: int = 0
    disturbed: bool = False  # the source was written past the optimizers since ``stage``
    writer: Future[None] | None = None
    pieces: list[Piece] = field(default_factory=list)


class Training(RuleBasedStateMachine):
    """One generated program over one stager."""

    def __init__(self, kind: str, gate: threading.Event) -> None:
        super().__init__()
        self.kind = kind
        self.gate = gate
        self.stager = build(kind, max_in_flight=4)
        self.held: list[Held] = []
        self.disturbed = False
        self.threads = ThreadPoolExecutor(1)

    @initialize(optimizer=st.sampled_from(sorted(OPTIMIZERS)))
    def begin(self, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 96))
        self.optimizer = OPTIMIZERS[optimizer]([*self.model[0].parameters(), *self.model[1].parameters()])
        self.other = torch.optim.SGD(self.model[2].parameters(), lr=1e-3, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.extra: dict[str, Any] = {"step": 0}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [self.optimizer.state_dict(), self.other.state_dict()],
            "schedule": self.schedule.state_dict(),
            "average": self.average,
            "extra": self.extra,
            "tied": self.model[0].weight.t(),
        }

    # -- training

    @rule()
    def train(self) -> None:
        self.forward()
        self.optimizer.step()
        self.other.step()
        self.schedule.step()
        self.model.zero_grad()
        self.extra["step"] += 1

    @rule()
    def forward(self) -> None:
        self.model(torch.randn(8, 96)).square().mean().backward()

    @rule()
    def update_averages(self) -> None:
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.model.parameters()], 0.5)

    @rule()
    def load(self) -> None:
        self.model.load_state_dict({name: x * 0.9 for name, x in self.model.state_dict().items()})

    @rule(how=st.sampled_from(["data", "numpy", "moments", "buffers", "new memory"]))
    def write_past_the_optimizer(self, how: str) -> None:
        weight = self.model[0].weight
        if how == "data":
            weight.data.add_(0.01)
        elif how == "numpy":
            weight.detach().numpy()[:] *= 1.01
        elif how == "moments":
            for x in self.optimizer.state.get(weight, {}).values():
                if isinstance(x, torch.Tensor) and x.dim():
                    x.data.add_(0.01)
        elif how == "buffers":
            self.model[1].running_mean.data.add_(1)
        else:
            weight.data = weight.data.clone().add_(1)
        self.disturbed = True
        for each in self.held:
            each.disturbed = True

    @rule(what=st.sampled_from(["add", "remove", "dtype", "shape", "forget moments"]))
    def change_structure(self, what: str) -> None:
        if what == "add":
            self.extra[f"new{len(self.extra)}"] = torch.randn(7, 5)
        elif what == "remove" and len(self.extra) > 1:
            self.extra.popitem()
        elif what == "dtype":
            self.average = {name: x.double() if x.dtype == torch.float32 else x for name, x in self.average.items()}
            self.average = {name: x.float() for name, x in self.average.items()}
        elif what == "shape":
            self.extra["ragged"] = torch.randn(len(self.extra), self.extra["step"] + 1)
        elif what == "forget moments":
            self.optimizer.state.clear()

    # -- staging

    @precondition(lambda self: len(self.held) < 3)
    @rule()
    def stage(self) -> None:
        state = self.state()
        expected = kept(state)
        self.gate.clear()
        for _ in range(5):
            try:
                staged = self.stager.stage(state)
            except StagingError:  # of an earlier copy; raised once
                self.assert_may_fail(self.disturbed)
            else:
                self.held.append(Held(staged, expected))
                return
        raise AssertionError("stage does not recover")

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 2), count=st.integers(1, 12))
    def read_a_little(self, which: int, count: int) -> None:
        each = self.held[which % len(self.held)]
        if not each.pieces:
            staged = self.outcome(each)
            if staged is None:  # it stays, for what comes next must not depend on who was faster
                return
            each.pieces = list(pieces(staged))
            assert len(each.pieces) == len(each.expected)
        for k in range(each.read, min(each.read + count, len(each.pieces))):
            assert same(each.pieces[k], each.expected[k]), each.expected[k][0]
            each.read = k + 1

    @precondition(lambda self: any(each.writer is None for each in self.held))
    @rule()
    def write_on_another_thread(self) -> None:
        self.gate.set()
        each = next(each for each in self.held if each.writer is None)
        staged, expected = each.staged, each.expected
        each.writer = self.threads.submit(lambda: assert_whole(settled(staged), expected))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 2), unread=st.booleans())
    def let_go(self, which: int, unread: bool) -> None:
        self.finish(self.held.pop(which % len(self.held)), unread)

    @rule()
    def close(self) -> None:
        self.gate.set()
        try:
            self.stager.close()
        except StagingError:
            self.assert_may_fail(self.disturbed)
        self.stager = build(self.kind, max_in_flight=4)
        self.disturbed = any(each.disturbed for each in self.held)

    # -- checks

    def outcome(self, each: Held) -> Any:
        self.gate.set()
        try:
            return settled(each.staged)
        except StagingError:
            self.assert_may_fail(each.disturbed)

    def assert_may_fail(self, disturbed: bool) -> None:
        assert disturbed, "nothing was written past the optimizers"
        assert self.kind == "overlapped", "only a copy made later can miss its source"

    def finish(self, each: Held, unread: bool = False) -> None:
        self.gate.set()
        try:
            if each.writer is not None:
                each.writer.result(timeout=LOCK_TIMEOUT_S)
        except StagingError:
            self.assert_may_fail(each.disturbed)
        staged = None if unread else self.outcome(each)
        if staged is not None:
            assert_whole(staged, each.expected)

    def teardown(self) -> None:
        try:
            self.close()
            self.stager.close()
            for each in self.held:
                self.finish(each)
        finally:
            self.threads.shutdown(wait=True)


@pytest.mark.parametrize(("examples", "steps"), [(examples(25), 50), pytest.param(600, 80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "held_back"), [*((kind, False) for kind in KINDS), ("overlapped", True)])
def test_every_copy_is_the_state_at_the_call_of_stage(
    kind: str, held_back: bool, examples: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = settings(
        max_examples=3 * examples if held_back else examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    gate, run = threading.Event(), DeferredCopy.run
    if held_back:
        monkeypatch.setattr(DeferredCopy, "run", lambda late: [gate.wait(LOCK_TIMEOUT_S), run(late)][1])
    run_state_machine_as_test(lambda: Training(kind, gate), settings=programs)
