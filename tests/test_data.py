"""The sampler: each sample once an epoch, whoever is killed and however many ranks go on; and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import stagereg
import stagereg.errors as errors
from stagereg.data import LoadsEveryRank, ResumableSampler, is_position
from stagereg.errors import CheckpointError, ConfigError
from stagereg.testing import run_ranks

from .support.examples import examples
from .support.pages import Page


class Ahead(DataLoader):
    """Fetches batches ahead of its loop, as workers do."""

    ahead = 0

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        fetched = deque(itertools.islice(batches, self.ahead))
        for batch in itertools.chain(batches, [None] * self.ahead):
            fetched.append(batch)
            if (first := fetched.popleft()) is not None:
                yield first


@dataclass
class Run:
    """Simulated ranks that are killed and started anew, and a ledger of the samples that the final state has seen."""

    length: int
    epochs: int
    size: int
    ahead: int
    streams: bool  # epochs go by in one loop, so that ranks drift apart; else all ranks begin each together
    draw: random.Random
    saved: list[dict[str, Any]] | None = None
    ledger: Counter[int] = field(default_factory=Counter)  # as of what is saved

    def life(self, world: int, steps: int | None, every: int) -> bool:
        """Train for so many steps, or to the end; return whether that was reached."""
        samplers = [ResumableSampler(range(self.length), world, rank, seed=7) for rank in range(world)]
        for rank, sampler in enumerate(samplers if self.saved else ()):
            sampler.load_state_dicts(self.saved, rank if len(self.saved) == world else None)
        loaders = [Ahead(range(self.length), self.size, sampler=sampler) for sampler in samplers]
        for loader in loaders:
            loader.ahead = self.ahead
        seen, taken = self.ledger.copy(), 0
        for epoch in (0,) if self.streams else range(samplers[0].epoch, self.epochs):
            passes: list[Iterator[Any] | None] = [None] * world
            epochs = self.epochs if self.streams else None
            for sampler in () if self.streams else samplers:
                sampler.set_epoch(epoch)
            left = set(range(world))
            while left:
                for rank in sorted(left):
                    if len(left) > 1 and self.draw.random() < 0.2:  # it is slower than the others
                        continue
                    if passes[rank] is None or self.draw.random() < 0.1:  # or begins its loop anew
                        if passes[rank] is not None:
                            passes[rank].close()
                        passes[rank] = iter(samplers[rank].batches(loaders[rank], epochs))
                    batch = next(passes[rank], None)
                    if batch is None:
                        left.remove(rank)
                    else:
                        seen.update(batch.tolist())
                taken += 1
                if taken % every == 0 or not left:
                    self.saved = json.loads(json.dumps([sampler.state_dict() for sampler in samplers]))
                    self.ledger = seen.copy()
                if taken == steps:
                    return False
        return True


LIVES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 4)), max_size=8)


@settings(max_examples=examples(400), deadline=None)
@given(
    length=st.integers(0, 40),
    epochs=st.integers(1, 4),
    size=st.integers(1, 5),
    ahead=st.integers(0, 4),
    streams=st.booleans(),
    lives=LIVES,
    last=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@example(length=13, epochs=3, size=2, ahead=2, streams=True, lives=[(4, 3, 1), (3, 2, 1), (1, 4, 2)], last=2, seed=0)
def test_each_sample_is_seen_once_an_epoch_over_kills(
    length: int,
    epochs: int,
    size: int,
    ahead: int,
    streams: bool,
    lives: list[tuple[int, int, int]],
    last: int,
    seed: int,
) -> None:
    run = Run(length, epochs, size, ahead, streams, random.Random(seed))
    over = any(run.life(world, steps, every) for world, steps, every in lives)
    assert over or run.life(last, None, 1)
    assert run.ledger == Counter(dict.fromkeys(range(length), epochs))


def test_the_order_is_that_of_torchs_distributed_sampler() -> None:
    for rank in range(3):
        ours, torchs = ResumableSampler(range(24), 3, rank, seed=5), DistributedSampler(range(24), 3, rank, seed=5)
        for epoch in (0, 4):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
    assert list(ResumableSampler(range(5), 2, 1, shuffle=False)) == [1, 3]
    assert list(ResumableSampler(range(8), seed=5)) == [
        3,
        6,
        0,
        2,
        1,
        4,
        5,
        7,
    ]  # another torch may not draw another order


@pytest.mark.slow
def test_what_workers_have_fetched_ahead_is_not_consumed() -> None:
    def loader_of(sampler: ResumableSampler) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": "spawn"}
        return DataLoader(range(40), batch_size=3, sampler=sampler, **options)

    sampler = ResumableSampler(range(40))
    batches = iter(sampler.batches(loader_of(sampler)))
    seen = [*next(batches).tolist(), *next(batches).tolist()]
    state = sampler.state_dict()
    batches.close()
    ranks = [ResumableSampler(range(40), 2, rank) for rank in range(2)]
    for each in ranks:
        each.load_state_dicts([state], None)
    assert state["consumed"] == 6
    assert [len(each) for each in ranks] == [17, 17]
    seen += [index for each in ranks for index in each]
    assert sorted(seen) == [*range(40)]


def test_a_position_is_a_few_numbers_for_any_dataset() -> None:
    sizes = []
    for length in (100, 100_000):
        sampler = ResumableSampler(range(length), 4, 1)
        sampler.advance(20)
        sizes.append(len(json.dumps(sampler.state_dict())))
    assert sizes[1] <= sizes[0] + 3 < 200


def passed(sampler: ResumableSampler, size: int = 2, **options: Any) -> list[int]:
    loader = DataLoader(range(sampler.length), size, sampler=sampler)
    batches = sampler.batches(loader, **options)
    announced = len(batches)
    found = list(batches)
    assert announced == len(found)
    return [index for batch in found for index in batch.tolist()]


def test_drop_last_gives_all_ranks_as_many() -> None:
    ranks = [ResumableSampler(range(11), 4, rank, drop_last=True) for rank in range(4)]
    shares = [passed(sampler) for sampler in ranks]
    assert [len(share) for share in shares] == [2] * 4
    assert len({index for share in shares for index in share}) == 8


def test_starting_a_loader_leaves_training_its_random_numbers() -> None:
    seeds = []
    for _ in range(2):
        torch.manual_seed(0)
        sampler = ResumableSampler(range(4))
        loader = DataLoader(range(4), 2, sampler=sampler)
        before = torch.get_rng_state()
        for _ in sampler.batches(loader, epochs=2):
            pass
        assert torch.equal(before, torch.get_rng_state())
        seeds.append(torch.rand(1).item())
    assert seeds[0] == seeds[1]


def restored(states: list[dict[str, Any]], own: int | None = None, **changed: Any) -> None:
    ResumableSampler(**{"dataset": range(10), "num_replicas": 1, "rank": 0, **changed}).load_state_dicts(states, own)


def test_another_dataset_or_order_is_refused_with_both_values() -> None:
    states = [ResumableSampler(range(10), 2, rank).state_dict() for rank in range(2)]
    for changed, text in (
        ({"dataset": range(9)}, "length=10, but now has length=9"),
        ({"seed": 3}, "seed=0, but now has seed=3"),
        ({"shuffle": False}, "shuffle=True, but now has shuffle=False"),
    ):
        for own, replicas in ((None, 1), (0, 2)):
            with pytest.raises(CheckpointError, match=text):
                restored(states, own, num_replicas=replicas, **changed)


def test_ranks_of_which_nothing_is_known_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The Checkpointer of global ranks 5 and 6 restores what four ranks saved.
    monkeypatch.setattr(errors, "global_ranks", ContextVar("global_ranks", default=(5, 6)))
    assert errors.name_ranks([0, 1]) == "ranks 5, 6"
    states = [ResumableSampler(range(10), 4, rank).state_dict() for rank in (0, 2)]
    text = "the data was assigned to 4 ranks, but the state of ranks 1, 3 is missing"
    with pytest.raises(CheckpointError, match=text):
        restored(states)
    with pytest.raises(CheckpointError, match="the state of ranks 1, 2, 3 is missing"):
        ResumableSampler(range(10), 2, 1).load_state_dict(states[0])
    apart = [ResumableSampler(range(10), 1, 0) for _ in range(2)]
    apart[0].advance(1)
    with pytest.raises(CheckpointError, match="the ranks had separate data, so only the same world size can resume"):
        restored([each.state_dict() for each in apart])
    restored([each.state_dict() for each in apart], 1)


def test_ranks_that_share_their_data_count_once() -> None:
    states = []
    for rank in (0, 0, 1, 1):  # two tensor parallel ranks each
        sampler = ResumableSampler(range(10), 2, rank)
        sampler.advance(2 + rank)
        states.append(sampler.state_dict())
    one = ResumableSampler(range(10), 1, 0)
    one.load_state_dicts(states, 0)
    assert len(one) == 5


def test_an_epoch_that_is_over_is_an_error() -> None:
    sampler = ResumableSampler(range(4))
    sampler.set_epoch(2)
    with pytest.raises(ConfigError, match=r"Epoch 1 is over: .*for epoch in range\(sampler.epoch, epochs\)"):
        sampler.set_epoch(1)
    passed(sampler)
    with pytest.raises(ConfigError, match=r"Epoch 2 is over: call sampler.set_epoch\(3\)"):
        passed(sampler)
    sampler.set_epoch(3)
    assert len(passed(sampler)) == 4
    with pytest.raises(ConfigError, match=r"must be in 0\.\.0, the samples left on rank 0; got 1"):
        sampler.advance(1)


def test_a_loop_that_counts_nothing_cannot_be_saved() -> None:
    sampler = ResumableSampler(range(4))
    next(iter(DataLoader(range(4), 2, sampler=sampler)))
    with pytest.raises(CheckpointError, match=r"its consumed samples are not counted.* sampler.batches\(loader\)"):
        sampler.state_dict()
    passed(sampler, limit=1)
    assert sampler.state_dict()["consumed"] == 2


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_loaders_whose_order_is_another_are_refused() -> None:
    sampler, other = ResumableSampler(range(8)), ResumableSampler(range(8))

    class Sorted(BatchSampler):
        pass

    for loader in (
        DataLoader(range(8), 2, sampler=other),
        DataLoader(range(8), 2),
        DataLoader(range(8), batch_sampler=Sorted(sampler, 2, False)),
        DataLoader(range(8), 2, sampler=sampler, in_order=False),
        DataLoader(Stream(), 2),
    ):
        with pytest.raises(ConfigError, match=r"takes a DataLoader\(dataset, batch_size=..., sampler=sampler\)"):
            sampler.batches(loader)
    assert [*sampler.batches(DataLoader(range(8), None, sampler=sampler))] == list(other)
    with pytest.raises(ConfigError, match=r"A Stream has no length, .* StatefulDataLoader"):
        ResumableSampler(Stream())
    with pytest.raises(ConfigError, match="below num_replicas=2 and at least 0, got 2"):
        ResumableSampler(range(8), 2, 2)


def test_positions_are_told_from_what_is_trained() -> None:
    class Position:
        def __iter__(self) -> Iterator[int]:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    class Schedules(Position):
        def step(self) -> None: ...

    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(parameters)
    trained = [torch.nn.ModuleList(), optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), Schedules()]
    assert not any(map(is_position, [*trained, {}, [], range(3), DataLoader(range(3))]))
    assert is_position(Position())
    assert is_position(ResumableSampler(range(3)))
    assert isinstance(ResumableSampler(range(3)), LoadsEveryRank)
    assert not isinstance(Position(), LoadsEveryRank)


def run_page(rank: int, world_size: int, blocks: list[str]) -> tuple[int, int]:
    space: dict[str, Any] = {}
    steps = []
    for block in blocks:
        exec(block, space)
        steps.append(space["step"])
    return steps[0], space["sampler"].state_dict()["consumed"]


def test_the_blocks_of_the_page_run_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *ours, torchdatas = Page("data.md").of("python")
    assert len(ours) == 5
    assert "StatefulDataLoader" in torchdatas  # integrations/test_torchdata.py runs it
    interrupted = ours[0].replace("epochs=3", "epochs=3, limit=10")
    assert interrupted != ours[0]
    assert run_ranks(run_page, nproc=3, args=([interrupted],)) == [(10, 4)] * 3
    assert run_ranks(run_page, nproc=2, args=(ours,)) == [(10 + 12 + 13, 51), (10 + 12 + 13, 50)]


def test_a_batch_drawn_before_the_save_is_used_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = (block for block in Page("data.md").of("python") if "next_batch" in block)
    assert "range(start + 1, 13)" in recipe
    weights = []
    for folder, ends in (("whole", (13,)), ("resumed", (8, 13))):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for seed, end in enumerate(ends):
            torch.manual_seed(seed)
            model = torch.nn.Linear(8, 1)
            dataset = TensorDataset(torch.arange(808.0).view(101, 8).sin())
            space = {"torch": torch, "stagereg": stagereg, "dataset": dataset, "model": model}
            space["optimizer"] = torch.optim.AdamW(model.parameters())
            exec(recipe.replace("13)", f"{end})"), space)
            assert space["start"] == (7 if seed else 0)
        weights.append(model.weight)
    assert torch.equal(*weights)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.booleans(), st.randoms())
@example(21, 2, 4, 3, False, random.Random(4))
@example(21, 2, 4, 3, False, random.Random(7))
def test_where_another_rank_is_follows_from_one_rank_where_that_is_sure(
    length: int, replicas: int, size: int, steps: int, drop_last: bool, choose: random.Random
) -> None:
    states = []
    for rank in range(replicas):
        sampler = ResumableSampler(range(length), replicas, rank, drop_last=drop_last)
        taken = sampler.batches(DataLoader(range(length), size, sampler=sampler), epochs=3, limit=steps)
        assert len([*taken]) <= steps
        states.append(sampler.state_dict())
    own, other = choose.randrange(replicas), choose.randrange(replicas)
    sampler = ResumableSampler(range(length), replicas, own, drop_last=drop_last)
    found, sure = sampler.of_other_rank(states[own], own, other, replicas)
    if sure:
        assert found == states[other]
    assert sure or length % replicas
    assert sampler.of_other_rank(states[own], own, other, replicas + 1) is None


def last_saved(rank: int, world_size: int, root: str, throws: bool) -> Any:
    """Save what was trained when a loop is left with a batch taken and not trained on; return what is left."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    sampler = ResumableSampler(range(9), shuffle=False)
    state = {"model": model, "sampler": sampler}
    with stagereg.Checkpointer(root, every=100) as checkpointer:
        step, loader = 0, DataLoader(range(9), 2, sampler=sampler)
        join = stagereg.Join([model], throw_on_early_termination=throws, mode="counted")
        try:
            with join:
                for batch in join.iterate(sampler.batches(loader)):
                    if not throws and step == 2:
                        break
                    join.mean(model(batch[:, None].float()).sum(), len(batch)).backward()
                    step += 1
                    checkpointer.maybe_save(step, state)
        except stagereg.UnevenInputsError:
            checkpointer.save(step, state)
        checkpointer.wait()
    again = ResumableSampler(range(9), shuffle=False)
    with stagereg.Checkpointer(root) as checkpointer:
        assert checkpointer.restore({"sampler": again}) == step == 2
    return list(again)


@pytest.mark.parametrize("throws", [False, True], ids=["break", "throw"])
def test_a_batch_that_was_only_taken_is_not_consumed(tmp_path: Path, throws: bool) -> None:
    assert run_ranks(last_saved, nproc=2, args=(str(tmp_path), throws)) == [[8], []]
