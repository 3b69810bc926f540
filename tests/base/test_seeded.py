"""Samples whose random numbers follow from seed, epoch and index: the same ones after any interruption."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

import stagereg
from stagereg.base.seeded import SampleIndex, SeededDataset
from stagereg.data import ResumableSampler
from stagereg.errors import CheckpointError, ConfigError


class Augmented(Dataset[list[float]]):
    """Each sample is its index and numbers of all three generators."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        assert type(index) is int
        if not 0 <= index < self.length:
            raise IndexError(index)
        draws = [torch.rand(()).item(), torch.randn(3)[2].item(), random.random(), random.gauss(0, 1)]
        return [float(index), *draws, numpy.random.rand(), numpy.random.randn()]


class Batched(Augmented):
    """Fetches whole batches, and draws once for each."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        number = random.random()
        return [[*self[index], number] for index in indices]


def collated(samples: list[list[float]]) -> list[tuple[float, ...]]:
    return [tuple(sample) for sample in samples]


def loader_of(dataset: Any, sampler: Any, workers: int = 0, context: str | None = None, **options: Any) -> Any:
    options = {"collate_fn": collated, "batch_size": 3, **options}
    return DataLoader(dataset, sampler=sampler, num_workers=workers, multiprocessing_context=context, **options)


def run(
    world: int, steps: int, saved: list[Any] | None, dataset: Any, workers: int, context: str | None, epochs: int = 3
) -> tuple[Counter[Any], list[Any]]:
    """Train ``world`` ranks for ``steps`` batches each; return the samples with their epochs, and the states."""
    seen: Counter[Any] = Counter()
    states = []
    for rank in range(world):
        sampler = ResumableSampler(dataset, world, rank, seed=5)
        if saved is not None:
            sampler.load_state_dicts(saved, rank if len(saved) == world else None)
        persistent = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
        loader = loader_of(dataset, sampler, workers, context, **persistent)
        for batch in sampler.batches(loader, epochs=epochs, limit=steps):
            seen.update((sampler.epoch, *sample) for sample in batch)
        states.append(sampler.state_dict())
    return seen, states


@functools.cache
def whole() -> Counter[Any]:
    """The samples of a run that is not interrupted."""
    return run(1, 100, None, stagereg.data.seeded(Augmented(), seed=3), 0, None)[0]


@pytest.fixture(scope="module")
def child() -> Iterator[Callable[..., Any]]:
    """A process without threads, which may fork workers."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=300)


def resumed(workers: int, context: str | None) -> tuple[Counter[Any], Counter[Any]]:
    """The samples of two ranks that are interrupted within the second epoch, and of three that go on."""
    dataset = stagereg.data.seeded(Augmented(), seed=3)
    first, states = run(2, 6, None, dataset, workers, context)
    return first, run(3, 100, states, dataset, workers, context)[0]


@pytest.mark.parametrize(
    ("workers", "context"),
    [
        (0, None),
        (2, "fork"),
        pytest.param(4, "fork", marks=pytest.mark.slow),
        pytest.param(2, "spawn", marks=pytest.mark.slow),
        pytest.param(4, "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_resumes_within_an_epoch_on_other_ranks_gets_the_same_samples(
    workers: int, context: str | None, child: Callable[..., Any]
) -> None:
    first, rest = child(resumed, workers, context)
    assert {epoch for epoch, *_ in first} == {0, 1}
    assert first + rest == whole()
    assert {*whole().values()} == {1}
    assert len({sample[2:] for sample in whole()}) == 3 * 23  # no epoch draws what another one draws


def test_numbers_of_a_sample_do_not_depend_on_its_batch() -> None:
    dataset = stagereg.data.seeded(Batched(), seed=3)
    assert [dataset[SampleIndex(i, 0)] for i in (4, 5)] != dataset.__getitems__([SampleIndex(i, 0) for i in (4, 5)])
    every, _ = run(1, 100, None, dataset, 0, None, epochs=1)
    first, states = run(2, 2, None, dataset, 0, None, epochs=1)
    rest, _ = run(3, 100, states, dataset, 0, None, epochs=1)
    assert first + rest == every
    assert {len(sample) for sample in every} == {9}


def test_the_generators_of_the_program_are_not_disturbed() -> None:
    def drawn() -> list[Any]:
        return [
            torch.rand(2).tolist(),
            torch.randn(1).item(),
            random.random(),
            random.gauss(0, 1),
            numpy.random.randn(),
        ]

    class Failing(Augmented):
        def __getitem__(self, index: int) -> list[float]:
            super().__getitem__(index)
            raise ValueError("broken file")

    results = []
    for uses in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        torch.randn(1)
        random.gauss(0, 1)
        numpy.random.randn()  # half of a pair is kept in each generator
        if uses:
            stagereg.data.seeded(Augmented())[SampleIndex(3, 2)]
            with pytest.raises(ValueError, match="broken file"):
                stagereg.data.seeded(Failing())[SampleIndex(3, 2)]
            nested = stagereg.data.seeded(stagereg.data.seeded(Augmented()))
            nested.dataset.set_epoch(1)
            nested[SampleIndex(3, 2)]
        results.append(drawn())
    assert results[0] == results[1]


def test_neighbours_draw_unrelated_numbers() -> None:
    first = []
    for seed in range(2):
        dataset = stagereg.data.seeded(Augmented(500), seed=seed)
        for epoch in range(2):
            first.append(torch.tensor([dataset[SampleIndex(index, epoch)][1:] for index in range(500)]))
    for column in range(6):
        rows = torch.stack([each[:, column] for each in first])
        assert len(rows.unique()) > 0.99 * rows.numel()
        assert (rows.corrcoef() - torch.eye(4)).abs().max() < 0.2
        assert torch.stack([rows[0, 1:], rows[0, :-1]]).corrcoef()[0, 1].abs() < 0.2
    uniform = first[0][:, (0, 2, 4)]
    assert (uniform.T.corrcoef() - torch.eye(3)).abs().max() < 0.2  # nor do the generators
    assert ((uniform.mean(0) - 0.5).abs() < 0.06).all()


def test_the_sampler_sends_the_epoch_to_a_loop_of_ones_own_too() -> None:
    dataset = stagereg.data.seeded(Augmented(), seed=3)
    sampler = ResumableSampler(dataset, 1, 0, seed=5)
    found = Counter((0, *dataset[index]) for index in sampler)
    sampler.set_epoch(1)
    found.update((1, *dataset[index]) for index in sampler)
    assert found == Counter(each for each in whole().elements() if each[0] < 2)
    assert [type(index) for index in ResumableSampler(range(4), 1, 0)] == [int] * 4
    [again] = pickle.loads(pickle.dumps([SampleIndex(7, 2)]))
    assert (again, again.epoch, hash(again)) == (7, 2, hash(7))


def epochs_of(workers: int, context: str | None, epochs: Sequence[int]) -> list[Counter[Any]]:
    """The samples of each epoch, through a sampler of torch and persistent workers; some passes are left early."""
    dataset = stagereg.data.seeded(Augmented(), seed=3)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    options = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    loader = loader_of(dataset, sampler, workers, context, **options)
    found = []
    for epoch in epochs:
        dataset.set_epoch(epoch)
        for _ in loader:  # workers fetch ahead what nothing takes
            break
        dataset.set_epoch(epoch + 1)
        found.append(Counter(sample for batch in loader for sample in batch))
    return found


@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_with_another_sampler_the_program_sets_the_epoch(
    workers: int, context: str | None, child: Callable[..., Any]
) -> None:
    found = child(epochs_of, workers, context, [0, 1])
    for epoch, samples in zip((1, 2), found, strict=True):
        assert samples == Counter(sample[1:] for sample in whole() if sample[0] == epoch)


def test_without_an_epoch_a_sample_is_an_error_and_not_that_of_another_epoch() -> None:
    dataset = stagereg.data.seeded(Augmented())
    with pytest.raises(ConfigError, match=r"The epoch of a sample is unknown.* Call set_epoch\(epoch\)"):
        dataset[3]
    inner = stagereg.data.seeded(Augmented())
    for outer in (ConcatDataset([inner, inner]), Subset(inner, [1, 2])):
        loader = DataLoader(outer, sampler=ResumableSampler(outer), collate_fn=collated)
        with pytest.raises(ConfigError, match="pass the outermost dataset to seeded"):
            next(iter(loader))
    dataset.set_epoch(0)
    assert dataset[3] == dataset[SampleIndex(3, 0)] != dataset[SampleIndex(3, 1)]
    assert pickle.loads(pickle.dumps(dataset))[3] == dataset[3]
    for wrong in (-1, 1.5, None):
        with pytest.raises(ConfigError, match="epoch must be a whole number"):
            dataset.set_epoch(wrong)  # type: ignore[arg-type]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_has_no_index_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with __getitem__, got Stream: the samples of an iterable dataset have no"):
        stagereg.data.seeded(Stream())
    with pytest.raises(ConfigError, match="seed must be an integer, got 'a'"):
        stagereg.data.seeded(range(3), seed="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"integer indices, got \[1, 2\]"):
        stagereg.data.seeded(range(3))[[1, 2]]  # type: ignore[index]


def test_another_seed_of_the_samples_is_refused_with_both() -> None:
    def sampler_of(seed: int | None) -> ResumableSampler:
        return ResumableSampler(range(9) if seed is None else stagereg.data.seeded(range(9), seed=seed), 1, 0)

    state = sampler_of(3).state_dict()
    with pytest.raises(CheckpointError, match=r"seed=3\), but now seed is 4: .* Use seed=3"):
        sampler_of(4).load_state_dict(state)
    late = sampler_of(None)
    late.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"seed=3\), but now seed is 4"):
        late.batches(DataLoader(stagereg.data.seeded(range(9), seed=4), sampler=late))  # type: ignore[arg-type]
    assert late.state_dict()["sample_seed"] == 3
    for saved, here in ((state, None), (sampler_of(None).state_dict(), 3)):
        sampler_of(here).load_state_dict(saved)


# -- the hint


class Unseeded(Augmented):
    pass


class Still(Dataset[float]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> float:
        return float(index)


def init(worker: int) -> None:
    random.random()


def hints(dataset: Any, workers: int = 2, **options: Any) -> list[str]:
    """What is logged while two epochs are begun."""
    logged: list[str] = []
    log, handler = logging.getLogger("stagereg.data"), logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    sampler = ResumableSampler(dataset, 1, 0, seed=8)
    options = {"collate_fn": collated, **options}
    loader = loader_of(dataset, sampler, workers, "fork" if workers else None, **options)
    for _ in range(2):
        for _ in sampler.batches(loader, epochs=sampler.epoch + 1, limit=2):
            pass
        sampler.set_epoch(sampler.epoch + 1)
    log.removeHandler(handler)
    assert (loader.collate_fn, loader.worker_init_fn) == (options["collate_fn"], options.get("worker_init_fn"))
    return logged


def all_hints() -> list[list[str]]:
    return [
        hints(Unseeded()),
        hints(Unseeded(), persistent_workers=True, worker_init_fn=init),
        hints(Still(), collate_fn=listed, worker_init_fn=init),
        hints(stagereg.data.seeded(Unseeded())),
        hints(Unseeded(), workers=0),  # these numbers are restored
    ]


def listed(samples: Any) -> Any:
    return [*samples]


def test_workers_that_draw_numbers_for_samples_are_hinted_at_once(child: Callable[..., Any]) -> None:
    [text], own_init, *others = child(all_hints)
    assert "workers of the data loader draw random numbers for the samples of Unseeded" in text
    assert "dataset = stagereg.data.seeded(dataset, seed=8)" in text
    assert own_init == [text]
    assert others == [[], [], []]


def test_a_seeded_dataset_leads_to_its_own() -> None:
    own = Augmented(4)
    dataset = stagereg.data.seeded(own, seed=2)
    assert isinstance(dataset, SeededDataset)
    assert (dataset.dataset, dataset.seed, len(dataset)) == (own, 2, 4)
