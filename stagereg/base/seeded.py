"""Make the random numbers of a sample depend only on a seed, the epoch and the sample's index.

A data loader's workers prefetch, and draw augmentations from their own generators, which are not checkpointed. This
module seeds the generators before each sample, so the random numbers do not depend on the worker, the number of workers
or ranks, or interruptions. ``ResumableSampler`` sends the epoch with each index (:class:`SampleIndex`), because
persistent workers have a copy of the dataset from an earlier epoch.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from stagereg.errors import ConfigError, at_least

try:
    import numpy
except ImportError:  # torch works without NumPy
    numpy = None  # type: ignore[assignment]

T = TypeVar("T", covariant=True)


class SampleIndex(int):
    """An index into a dataset, with the epoch in which a sampler returned the index. Attributes: ``epoch``."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> SampleIndex:
        self = super().__new__(cls, index)
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndex, (int(self), self.epoch)


class SeededDataset(Dataset[T]):
    """The dataset that :func:`seeded` returns. Attributes: ``dataset``, ``seed``."""

    def __init__(self, dataset: Dataset[T] | Sequence[T], seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"stagereg.data.seeded takes a dataset with __getitem__, got {type(dataset).__name__}: the samples of "
                "an iterable dataset have no index to seed from."
            )
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"stagereg.data.seeded: seed must be an integer, got {seed!r}.")
        self.dataset, self.seed = dataset, seed
        self._epoch = torch.full((), -1, dtype=torch.int64, device="cpu")  # -1 until set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for samplers that are not a ``ResumableSampler``.

        Call before ``iter(loader)``, not during a pass: workers that prefetch see the new epoch immediately.

        Raises:
            ConfigError: ``epoch`` is not a whole number of at least 0.
        """
        self._epoch.share_memory_().fill_(at_least(0, "epoch", epoch))  # persistent workers read the shared memory

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> T:
        [sample] = self._fetch([index], self.dataset.__getitem__)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        batched = getattr(self.dataset, "__getitems__", None)  # called per index, as batches may differ after a resume
        return self._fetch(indices, (lambda index: batched([index])[0]) if batched else self.dataset.__getitem__)

    def _fetch(self, indices: Sequence[int], get: Callable[[int], T]) -> list[T]:
        keys = [self._key(index) for index in indices]
        before = _generator_states()
        try:
            samples = []
            for index, key in zip(indices, keys, strict=True):
                _seed_generators(key)
                samples.append(get(int(index)))
            return samples
        finally:
            _set_generators(before)

    def _key(self, index: Any) -> str:
        """Return the key that determines a sample's random numbers. Raises ``ConfigError`` if the epoch is unknown."""
        try:
            number = operator.index(index)
        except TypeError:
            raise ConfigError(f"A seeded dataset takes integer indices, got {index!r:.100}.") from None
        epoch = index.epoch if isinstance(index, SampleIndex) else int(self._epoch)
        if epoch < 0:
            raise ConfigError(
                "The epoch of a sample is unknown, but determines its random numbers. Call set_epoch(epoch) "
                "of the dataset that stagereg.data.seeded returned, before each epoch, or use "
                "stagereg.data.ResumableSampler(dataset). Subset and ConcatDataset drop the "
                "epoch: pass the outermost dataset to seeded."
            )
        return f"{self.seed}/{epoch}/{int(number)}"


def seeded(dataset: Dataset[T] | Sequence[T], seed: int = 0) -> SeededDataset[T]:
    """Return a map-style dataset whose samples draw random numbers that depend only on (seed, epoch, index).

    Before each sample, torch's CPU generator, Python's ``random`` and NumPy's global generator are seeded; afterwards
    their states are restored. So a run that resumes in the middle of an epoch gets the same augmented samples as an
    uninterrupted run, with any number of workers and ranks. Batches are fetched one sample at a time.

    Not covered: generators that the dataset creates (``numpy.random.default_rng()``), accelerator generators, and
    random numbers drawn by ``collate_fn``. Fetching from a thread of the training process disturbs the generators of
    training.

    Args:
        dataset: a dataset with ``__getitem__``. Pass the outermost dataset: a ``Subset``, not the dataset inside it. In
            a worker, ``get_worker_info().dataset.dataset`` is this dataset.
        seed: the seed, which must be the same on all ranks and in a resumed run.

    Raises:
        ConfigError: the dataset is iterable, or ``seed`` is not an integer.

    Example::

        dataset = stagereg.data.seeded(dataset, seed=1)
        sampler = stagereg.data.ResumableSampler(dataset, seed=1)  # sends the epoch to the workers
        loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=4, persistent_workers=True)

        # with another sampler:
        for epoch in range(epochs):
            distributed_sampler.set_epoch(epoch)
            dataset.set_epoch(epoch)
            for batch in loader: ...
    """
    return SeededDataset(dataset, seed)


def _generator_states() -> tuple[torch.Tensor, Any, Any]:
    numbers = None if numpy is None else numpy.random.get_state(legacy=False)
    return torch.default_generator.get_state(), random.getstate(), numbers


def _set_generators(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    if numpy is not None:
        numpy.random.set_state(states[2])


def _seed_generators(key: str) -> None:
    digest = hashlib.blake2b(key.encode(), digest_size=28).digest()  # a hash gives neighbouring indices unrelated seeds
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))  # torch.manual_seed would also seed CUDA
    random.seed(int.from_bytes(digest[8:24], "little"))
    if numpy is not None:
        numpy.random.seed(int.from_bytes(digest[24:], "little"))


class DrawCheck:
    """Detects whether a dataset draws random numbers from the global generators of a data loader's workers.

    The object is the loader's ``collate_fn``, and its method ``start`` is the loader's ``worker_init_fn``. In each
    worker, the states of the generators before and after the first batch are compared. ``drew``: a tensor in shared
    memory, 1 if a worker has drawn a random number, otherwise 0.
    """

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None) -> None:
        self._collate, self._init, self._before = collate, init, ""
        self.drew = torch.zeros((), dtype=torch.uint8, device="cpu").share_memory_()

    def start(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._before = _shown_states()

    def __call__(self, samples: Any) -> Any:
        if self._before:
            if self._before != _shown_states():
                self.drew.fill_(1)
            self._before = ""
        return self._collate(samples)


def _shown_states() -> str:
    bits, own, numbers = _generator_states()
    return repr((bits.tolist(), own, numbers and (numbers["state"]["pos"], numbers["state"]["key"].tolist())))
