"""A save that any rank of a join asks for has the current state, and all ranks take part, also those without data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError, StageregError
from stagereg.testing import run_ranks

from ..join.reference import EXACT, Case, Training, batch, difference, expected, join_of, length, net, wrapped

PLAIN = Case(lengths=(2, 4, 6), last="scheduler")
ASKED = {2: (0,), 3: (1, 2), 5: (2,), 6: (2,)}
"""By step, the ranks that ask for a checkpoint of it: rank 0 after its last batch, rank 2 alone, and at the end."""


def model_of(kind: str, case: Case) -> tuple[Any, Any]:
    """The model that the loop calls, and its joinable."""
    if kind == "fsdp2":
        module: Any = wrapped(replace(case, column="fsdp2"))
        return module, stagereg.build("joinable", "fsdp2", module=module)
    module = DistributedDataParallel(net(case))
    return module, stagereg.build("joinable", "ddp", module=module)


class Run:
    """A training run on ranks, with all that is saved of it."""

    def __init__(self, case: Case, kind: str, root: str) -> None:
        self.model, self.joinable = model_of(kind, case)
        self.training = Training(case, getattr(self.model, "module", self.model))
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.training.optimizer,
            "scheduler": self.training.scheduler,
            "taken": 0,
        }
        self.checkpointer = stagereg.Checkpointer(root, keep=9)
        self.saver = stagereg.build(
            "joinable", "checkpoint", checkpointer=self.checkpointer, state=self.state, module=self.model
        )
        steps = (self.training.optimizer.step, self.training.scheduler.step)
        followers = [stagereg.build("joinable", "step", step=step, after=self.joinable) for step in steps]
        self.joinables = [self.saver, self.joinable, *followers]


def trained(rank: int, parallel: str, library: str | None, root: str, waits: bool) -> Any:
    run = Run(PLAIN, parallel, root)
    batches = [batch(rank, 0, step) for step in range(length(PLAIN, rank, 0))]
    kind, options = join_of(None if library == "iterate" else library)
    if library == "planned":
        options["loader"] = batches
    with run.checkpointer:
        with kind(run.joinables, **options) as join:
            for step, x in enumerate(join.iterate(batches) if library == "iterate" else batches, 1):
                run.training.zero("start")
                run.model(x).sum().backward()
                run.training.finish()
                run.state["taken"] = step
                if rank in ASKED.get(step, ()):
                    run.saver.ask(step)
                if waits:
                    run.checkpointer.wait()
        return run.training.outcome()


def many(rank: int, world_size: int, root: str, runs: list[tuple[str, str | None, bool]]) -> list[Any]:
    return [trained(rank, kind, library, f"{root}/{i}", waits) for i, (kind, library, waits) in enumerate(runs)]


RUNS = [("ddp", None, False), ("fsdp2", "torch", True), ("ddp", "counted", True), ("fsdp2", "iterate", False)]
MORE = [
    (kind, library, waits)
    for kind in ("ddp", "fsdp2")
    for library in (None, "torch", "counted", "planned", "iterate")
    for waits in (False, True)
]


def restored(root: Path, step: int) -> Any:
    """What one process without any ranks reads from a checkpoint."""
    training = Training(PLAIN, net(PLAIN))
    state = {
        "model": training.module,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "taken": -1,
    }
    path = next(path for path in root.iterdir() if path.name.endswith(f"{step}") and not path.is_symlink())
    with stagereg.Checkpointer(str(root), resume=str(path)) as checkpointer:
        assert checkpointer.restore(state) == step
    assert state["taken"] == step
    return training.outcome()


def at(step: int) -> Any:
    """What a single process has after a step."""
    return expected(replace(PLAIN, lengths=tuple(min(length, step) for length in PLAIN.lengths)))


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some ways", "all ways"])
def test_a_save_of_any_rank_holds_the_state_of_that_step(tmp_path: Path, runs: Any) -> None:
    outcomes = run_ranks(many, 3, args=(str(tmp_path), runs), timeout_s=30 + 5 * len(runs))
    for i, run in enumerate(runs):
        for rank, results in enumerate(outcomes):
            assert difference(results[i], expected(PLAIN)) < EXACT, f"{run}, rank {rank}"
        for step in ASKED:
            assert difference(restored(tmp_path / str(i), step), at(step)) < EXACT, f"{run}, step {step}"


class Counts:
    """Stands in for a checkpointer, and remembers what it was asked to save."""

    preemption = None

    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []

    def due(self, step: int) -> bool:
        return step % 2 == 0  # as ``every`` says, or the plan of ``every="auto"``

    def remember(self, state: Any) -> None:
        pass

    def save(self, step: int, state: Any) -> None:
        self.save_in_join(step, state, follows=False)

    def save_in_join(self, step: int, state: Any, follows: bool) -> None:
        self.saved.append((step, follows))


def counted(rank: int, world_size: int, lengths: tuple[int, ...], library: str | None) -> Any:
    exchanges = 0
    model, joinable = model_of("ddp", PLAIN)
    counts = Counts()
    saver = stagereg.build("joinable", "checkpoint", checkpointer=counts, state={}, module=model)
    assert [saver.maybe(3), saver.maybe(4)] == [False, True]  # not in a join yet
    kind, options = join_of(library)
    with kind([saver, joinable], **options):
        plain = saver.exchange

        def exchange(active: bool) -> None:
            nonlocal exchanges
            exchanges += 1
            plain(active)

        saver.exchange = exchange
        for step in range(1, lengths[rank] + 1):
            with torch.no_grad():
                model.module(batch(rank, 0, step))
                model(batch(rank, 0, step))
            (model(batch(rank, 0, step)).sum() + model(batch(rank, 0, step + 1)).sum()).backward()
            saver.maybe(step)
    hooks = len(model._forward_pre_hooks) + len(model._forward_hooks) if library != "torch" else 0
    saver.ask(9)
    return exchanges, counts.saved, hooks


def counted_in_all(rank: int, world_size: int, lengths: tuple[int, ...]) -> list[Any]:
    return [counted(rank, world_size, lengths, library) for library in (None, "torch", "counted")]


def test_ranks_exchange_once_a_step_and_at_the_end() -> None:
    lengths = (1, 4)
    for rank, outcomes in enumerate(run_ranks(counted_in_all, 2, args=(lengths,), timeout_s=60)):
        for exchanges, saved, hooks in outcomes:
            assert exchanges == max(lengths) + 1
            left = rank == 0
            assert saved == [(4, False), (2, left), (4, left), (9, False)]
            assert hooks == 0


def failing(rank: int, root: str, why: str) -> tuple[list[Any], str]:
    """What is saved, and the error of a run that asks for different steps, or whose optimizer is not in the join."""
    model, joinable = model_of("ddp", PLAIN)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpointer = stagereg.Checkpointer(f"{root}/{why}", save_last=False)
    saver = stagereg.build("joinable", "checkpoint", checkpointer=checkpointer, state=state, module=model)
    with pytest.raises(StageregError) as caught, checkpointer, stagereg.Join([saver, joinable]):  # noqa: PT012
        for step in range(1, 2 + 2 * rank):
            model(batch(rank, 0, step)).sum().backward()
            optimizer.step()
            if why == "steps":
                saver.ask(step + rank)
            elif step == 2:
                saver.ask(step)
    return list(Path(root, why).glob("step-*")), str(caught.value)


def throwing(rank: int, world_size: int, mode: str | None) -> Any:
    model, joinable = model_of("fsdp2", PLAIN)
    counts = Counts()
    saver = stagereg.build("joinable", "checkpoint", checkpointer=counts, state={}, module=model)
    steps = 0
    with pytest.raises(stagereg.UnevenInputsError), stagereg.Join([saver, joinable], True, True, mode=mode):  # noqa: PT012
        for step in range(1, 3 + 2 * rank):
            model(batch(rank, 0, step)).sum().backward()
            saver.maybe(step + 1)
            steps += 1
    return steps, [step for step, _ in counts.saved]


@pytest.mark.parametrize("mode", [None, "counted"])
def test_a_join_that_throws_does_so_before_the_exchange(mode: str | None) -> None:
    assert run_ranks(throwing, 2, args=(mode,), timeout_s=30) == [(2, [2])] * 2


def misplaced(rank: int) -> list[str]:
    model, joinable = model_of("ddp", PLAIN)
    texts = []
    for module, order in ((None, 1), (model, -1)):
        saver = stagereg.build("joinable", "checkpoint", checkpointer=Counts(), state={}, module=module)

        def begin_a_step(listed: Any = [saver, joinable][::order]) -> None:
            TorchJoin(listed)
            model(batch(rank, 0, 0))

        with pytest.raises(JoinError) as caught:
            begin_a_step()
        texts.append(str(caught.value))
    with pytest.raises(JoinError) as caught:
        saver.ask(-1)
    return [*texts, str(caught.value)]


def all_errors(rank: int, world_size: int, root: str) -> Any:
    errors = [failing(rank, root, "stale"), failing(rank, root, "steps")]
    return errors, misplaced(rank)


def test_errors_are_raised_on_all_ranks_and_nothing_is_saved(tmp_path: Path) -> None:
    for errors, (nameless, misordered, negative) in run_ranks(all_errors, 2, args=(str(tmp_path),), timeout_s=60):
        assert [saved for saved, _ in errors] == [[], []]
        assert "'optimizer' is not the same on all ranks: it has taken 1 on rank 0, 2 on rank 1 steps" in errors[0][1]
        assert "rank 0 for step 1, rank 1 for step 2" in errors[1][1]
        assert "module=model" in nameless
        assert "comes first" in misordered
        assert "from 0 on" in negative
