"""A sampler that resumes at its position in the training data, with any number of ranks.

The order of an epoch depends only on the seed and the epoch. Rank ``r`` of ``n`` gets every ``n``-th sample of this
order, beginning with sample ``r``, so one number describes which samples a rank has consumed. After a resume with a
different world size, the remaining samples are assigned to the new ranks. The state contains these numbers for every
earlier world size in the epoch. Iterable datasets store their own position (:func:`is_position`), and need the same
world size to resume.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Sampler

from stagereg.base.seeded import DrawCheck, SampleIndex, SeededDataset, seeded
from stagereg.errors import CheckpointError, ConfigError, few_of

__all__ = ["CountedBatches", "LoadsEveryRank", "ResumableSampler", "is_position", "is_stateful", "seeded"]

_log = logging.getLogger(__name__)

_ORDER = ("length", "seed", "shuffle")  # attributes that determine, together with the epoch, the order of samples
T = TypeVar("T")


def is_stateful(value: Any) -> bool:
    """Return whether a value is an object, not a class, with ``state_dict`` and ``load_state_dict``."""
    try:
        has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    except Exception:  # raised by objects that generate attributes, such as configs
        return False
    return has_both and not isinstance(value, type)


def is_position(value: Any) -> bool:
    """Return whether a value contains a rank's position in data, as a data loader, sampler or dataset does.

    Such a value is stateful and iterable. It is not a module or optimizer, and its class has no ``step``, which
    excludes containers of schedulers.
    """
    trains = isinstance(value, (torch.nn.Module, Optimizer)) or hasattr(type(value), "step")
    return is_stateful(value) and isinstance(value, Iterable) and not trains


@runtime_checkable
class LoadsEveryRank(Protocol):
    """A data loader or sampler that can load its position with a different world size. Optional for stateful values."""

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], own: int | None) -> None:
        """Load the states of all ranks that saved. Called instead of ``load_state_dict``.

        Args:
            states: the result of ``state_dict`` on each rank that saved, by rank.
            own: the index of this rank's state in ``states``; ``None`` if a different world size saved.
        """


# Samplers whose consumed samples are counted. Global, because a checkpointer has no reference to the program's loops.
COUNTED: weakref.WeakSet[ResumableSampler] = weakref.WeakSet()


class ResumableSampler(Sampler[int]):
    """Assigns the samples of a map-style dataset to ranks, and resumes with any number of ranks.

    Replaces ``torch.utils.data.DistributedSampler``, with the same arguments. Put the sampler itself into a
    checkpointer's state. Loop over :meth:`batches`, which counts consumed samples. After a loop over the loader itself,
    :meth:`state_dict` raises. No sample is repeated or dropped. Some ranks may have one sample less: use a join or
    ``drop_last``.

    Args:
        dataset: a dataset with a length. The samples are its indices.
        num_replicas: the number of ranks that get samples; default: the size of the default process group, or 1.
        rank: the number of this rank; default: the rank in the default process group, or 0.
        shuffle: False assigns the samples in dataset order in each epoch.
        seed: the seed of the order, equal on all ranks. The order is the same as in ``DistributedSampler``.
        drop_last: drop samples at the end of an epoch, so that all ranks have the same number of samples.

    Attributes:
        epoch: the current epoch.
        sample_seed: the seed of a :func:`.seeded` dataset; ``None`` for other datasets.

    Raises:
        ConfigError: the dataset has no length, or ``rank`` is out of range.

    Example::

        sampler = ResumableSampler(dataset)
        loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        step = checkpointer.restore(state) or 0
        for batch in join.iterate(sampler.batches(loader, epochs=3)):
            train_one_step(batch)
            step += 1
            checkpointer.maybe_save(step, state)
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.num_replicas = (dist.get_world_size() if grouped else 1) if num_replicas is None else num_replicas
        self.rank = (dist.get_rank() if grouped else 0) if rank is None else rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                f"ResumableSampler: rank must be below num_replicas={self.num_replicas} and at least 0, got "
                f"{self.rank}."
            )
        try:
            self.length = len(dataset)
        except TypeError as error:
            raise ConfigError(
                f"A {type(dataset).__name__} has no length, so its samples cannot be assigned to ranks. For iterable "
                "datasets, use torchdata's StatefulDataLoader, and resume with the same world size."
            ) from error
        self.epoch = 0
        self.sample_seed = dataset.seed if isinstance(dataset, SeededDataset) else None
        self.hinted = False  # whether the warning about random numbers in workers was logged
        self._consumed = 0  # number of samples that this rank has consumed in the epoch
        self._dealt: list[tuple[int, list[int]]] = []  # by earlier world size: (epoch, samples per rank)
        self._drawn = self._counted = self._is_over = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue the restored epoch at the restored position.

        Raises:
            ConfigError: the epoch is over.
        """
        if epoch < self.epoch:
            raise ConfigError(
                f"Epoch {epoch} is over: the sampler is in epoch {self.epoch}, and samples would be repeated. After a "
                "restore, loop with: for epoch in range(sampler.epoch, epochs)."
            )
        if epoch > self.epoch:
            self.epoch, self._consumed, self._is_over = epoch, 0, False
            self._dealt = [each for each in self._dealt if each[0] >= epoch]

    def batches(self, loader: DataLoader[T], epochs: int | None = None, limit: int | None = None) -> CountedBatches[T]:
        """Return an iterable of this rank's remaining batches. A batch counts as consumed when the loop receives it.

        Args:
            loader: a loader over the dataset that uses this sampler. Its workers may prefetch.
            epochs: continue until this number of epochs is over; default: only the current epoch.
            limit: the maximum number of batches; a negative number counts as 0.

        Raises:
            ConfigError: the loader has a different sampler, or returns samples in a different order.
            CheckpointError: the dataset is :func:`.seeded` with a different seed than in the run that saved.
        """
        return CountedBatches(self, loader, epochs, limit)

    def advance(self, samples: int) -> None:
        """Count the next samples of this rank as consumed, in a loop that does not use :meth:`batches`.

        Raises:
            ConfigError: fewer than ``samples`` samples remain in the epoch.
        """
        if not 0 <= samples <= len(self):
            raise ConfigError(
                f"sampler.advance: samples must be in 0..{len(self)}, the samples left on rank {self.rank}; got "
                f"{samples}."
            )
        self._count()
        self._consumed += samples

    def _count(self) -> None:
        if not self._counted:
            self._counted = True
            COUNTED.add(self)

    def __len__(self) -> int:
        """Return the number of samples of this rank that remain in the epoch."""
        return self._left_in(self.epoch)

    def __iter__(self) -> Iterator[int]:
        self._drawn, epoch = True, self.epoch
        order = self._order(epoch)[self.rank :: self.num_replicas][self._consumed :][: len(self)]
        for part in order.split(4096):
            found = part.tolist()
            yield from found if self.sample_seed is None else (SampleIndex(index, epoch) for index in found)

    def _left_in(self, epoch: int) -> int:
        size = self.length - _sum_of(self._dealt, epoch)
        share = size // self.num_replicas if self.drop_last else _share(size, self.rank, self.num_replicas)
        return max(0, share - (self._consumed if epoch == self.epoch else 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank: a few numbers, whose size does not depend on the dataset.

        Raises:
            CheckpointError: samples were drawn, but not counted as consumed.
        """
        if self._drawn and not self._counted:
            raise CheckpointError(
                "A loop draws samples of a ResumableSampler, but its consumed samples are not counted. Loop "
                "over sampler.batches(loader) instead of the loader, or call sampler.advance(samples) in each step."
            )
        return {
            **{name: getattr(self, name) for name in (*_ORDER, "num_replicas", "rank", "epoch")},
            "consumed": self._consumed,
            "dealt": [[epoch, [*counts]] for epoch, counts in self._dealt],
            **({} if self.sample_seed is None else {"sample_seed": self.sample_seed}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of this rank that was saved with the same world size.

        Raises:
            CheckpointError: see :meth:`load_state_dicts`.
        """
        self.load_state_dicts([state], 0)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], own: int | None) -> None:
        """Continue at the position of the ranks that saved ``states``, with any world size.

        Raises:
            CheckpointError: the dataset, seed or order differs, or the state of a rank is missing.
        """
        if own is not None and (states[own]["num_replicas"], states[own]["rank"]) == (self.num_replicas, self.rank):
            self._expect_alike(states[own])
            dealt, epoch, consumed = states[own]["dealt"], states[own]["epoch"], states[own]["consumed"]
        else:
            dealt, epoch, consumed = self._dealt_by(states), min(each["epoch"] for each in states), 0
        self.epoch, self._consumed = epoch, consumed
        self._dealt = [(of, [*counts]) for of, counts in dealt if of >= epoch]
        self.sample_seed = states[0].get("sample_seed") if self.sample_seed is None else self.sample_seed
        self._drawn = self._counted = self._is_over = False

    def of_other_rank(
        self, state: Mapping[str, Any], own: int, rank: int, world_size: int
    ) -> tuple[dict[str, Any], bool] | None:
        """Derive the position of ``rank`` from ``state``, rank ``own``'s position after the same number of batches.

        Returns the position, and whether it is certain. It is uncertain if the ranks have different numbers of samples,
        and so maybe of batches, in an epoch. Returns ``None`` if the samples are not assigned to ``world_size`` ranks.
        """
        epoch, replicas = state["epoch"], state["num_replicas"]
        if (state["rank"], replicas) != (own, world_size):
            return None
        size = self.length - _sum_of(state["dealt"], epoch)
        here, share = (size // replicas if self.drop_last else _share(size, each, replicas) for each in (own, rank))
        sure = here == share or (epoch == 0 and state["consumed"] < min(here, share))
        return {**state, "rank": rank, "consumed": min(state["consumed"], share)}, sure

    def _expect_alike(self, state: Mapping[str, Any]) -> None:
        for name in _ORDER:
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    f"the sampler was saved with {name}={state[name]}, but now has {name}={getattr(self, name)}: in "
                    "a different order, samples would be repeated and skipped. Use the same dataset and seed, or "
                    "restore without the sampler to start from epoch 0"
                )
        self._seeds_samples_with(state.get("sample_seed"), self.sample_seed)

    def _seeds_samples_with(self, saved: int | None, here: int | None) -> None:
        if None not in (saved, here) and saved != here:
            raise CheckpointError(
                f"the sampler was saved with stagereg.data.seeded(dataset, seed={saved}), but now seed is {here}: "
                f"samples would get different random numbers. Use seed={saved}"
            )

    def _dealt_by(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[int]]]:
        """Return, for each epoch, how many samples each of the ranks that saved ``states`` has consumed."""
        saved: dict[int, Mapping[str, Any]] = {}
        replicas = states[0]["num_replicas"]
        for state in states:
            self._expect_alike(state)
            if saved.setdefault(state["rank"], state) != state or state["num_replicas"] != replicas:
                raise CheckpointError(
                    f"several ranks saved as rank {state['rank']} of {replicas}, each with a different position: the "
                    "ranks had separate data, so only the same world size can resume"
                )
        if missing := [rank for rank in range(replicas) if rank not in saved]:
            ranks = f"rank{'s' * (len(missing) > 1)} {few_of([*map(str, missing)], 10)}"  # ranks that saved
            raise CheckpointError(f"the data was assigned to {replicas} ranks, but the state of {ranks} is missing")
        behind = min(states, key=lambda each: each["epoch"])
        dealt = [(epoch, [*counts]) for epoch, counts in behind["dealt"]]
        for epoch in range(behind["epoch"], max(each["epoch"] for each in states) + 1):
            size = self.length - _sum_of(dealt, epoch)
            shares = [_share(size, rank, replicas) for rank in range(replicas)]
            dealt.append((epoch, [_past(saved[rank], epoch, share) for rank, share in enumerate(shares)]))
        return dealt

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the samples of an epoch in order, without samples that were consumed with earlier world sizes."""
        generator = torch.Generator("cpu").manual_seed(self.seed + epoch)
        if self.shuffle:
            order = torch.randperm(self.length, generator=generator, dtype=torch.int64, device="cpu")
        else:
            order = torch.arange(self.length, dtype=torch.int64, device="cpu")
        for counts in (counts for of, counts in self._dealt if of == epoch):
            left = torch.ones(len(order), dtype=torch.bool, device="cpu")
            for rank, consumed in enumerate(counts):
                left[rank :: len(counts)][:consumed] = False
            order = order[left]
        return order


class CountedBatches(Generic[T]):
    """The batches of :meth:`ResumableSampler.batches`. Has a length, so that a join can plan its steps."""

    def __init__(self, sampler: ResumableSampler, loader: DataLoader[T], epochs: int | None, limit: int | None) -> None:
        drawn_from = loader.sampler if loader.batch_size is None else getattr(loader.batch_sampler, "sampler", None)
        known = loader.batch_size is None or type(loader.batch_sampler) is BatchSampler
        if drawn_from is not sampler or not known or not loader.in_order or is_stateful(loader):
            raise ConfigError(
                "sampler.batches takes a DataLoader(dataset, batch_size=..., sampler=sampler) that returns batches in "
                "the sampler's order: no batch_sampler, in_order=True, and not a StatefulDataLoader, which stores its "
                "own position. In other loops, call sampler.advance(samples) in each step."
            )
        self._sampler, self._loader, self._epochs, self._limit = sampler, loader, epochs, limit
        self._given = 0
        self._check: DrawCheck | None = None  # checks whether workers draw random numbers for samples
        if isinstance(loader.dataset, SeededDataset):
            sampler._seeds_samples_with(sampler.sample_seed, loader.dataset.seed)
            sampler.sample_seed = loader.dataset.seed
        elif loader.num_workers and sampler.rank == 0 and not sampler.hinted:
            self._check = DrawCheck(loader.collate_fn, loader.worker_init_fn)

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        first, most = self._sampler.epoch, sys.maxsize if self._limit is None else max(0, self._limit - self._given)
        left = 0
        for epoch in range(first, first + 1 if self._epochs is None else self._epochs):
            left += self._batches(epoch)
            if left >= most:
                return most
        return left

    def __iter__(self) -> Iterator[T]:
        sampler, left = self._sampler, len(self)
        if sampler._is_over and self._epochs is None:
            raise ConfigError(
                f"Epoch {sampler.epoch} is over: call sampler.set_epoch({sampler.epoch + 1}), or loop over "
                "sampler.batches(loader, epochs=...), which continues over epochs."
            )
        sampler._count()
        while left:
            if not self._batches(sampler.epoch):
                sampler.set_epoch(sampler.epoch + 1)
                continue
            for batch in self._started():
                self._hint()
                sampler.advance(min(self._loader.batch_size or 1, len(sampler)))
                self._given, left = self._given + 1, left - 1
                yield batch
                if not left:
                    break
            if left and (missing := self._batches(sampler.epoch)):
                raise ConfigError(f"The loader ended {missing} batches early: its sampler has more samples.")
        sampler._is_over = not self._batches(sampler.epoch)

    def _started(self) -> Iterator[T]:
        """Start the loader. Does not draw the seed of its workers from the random generator that training uses."""
        with torch.random.fork_rng(devices=[]):
            sampler = self._sampler
            torch.default_generator.manual_seed(hash((sampler.seed, sampler.epoch, sampler.rank, len(sampler))))
            loader, check = self._loader, self._check
            if check is None:
                return iter(loader)
            given = loader.collate_fn, loader.worker_init_fn
            loader.collate_fn, loader.worker_init_fn = check, check.start
            try:
                return iter(loader)
            finally:
                loader.collate_fn, loader.worker_init_fn = given

    def _hint(self) -> None:
        if self._check is not None and self._check.drew:
            self._check, self._sampler.hinted = None, True
            _log.warning(
                "The workers of the data loader draw random numbers for the samples of %s. A run that resumes in the "
                "middle of an epoch draws different numbers. To draw the same, add before the sampler and the loader: "
                "dataset = stagereg.data.seeded(dataset, seed=%d)",
                *(type(self._loader.dataset).__name__, self._sampler.seed),
            )

    def _batches(self, epoch: int) -> int:
        size, left = self._loader.batch_size or 1, self._sampler._left_in(epoch)
        return left // size if self._loader.drop_last else -(-left // size)


def _sum_of(dealt: Iterable[tuple[int, list[int]]], epoch: int) -> int:
    return sum(sum(counts) for of, counts in dealt if of == epoch)


def _past(state: Mapping[str, Any], epoch: int, share: int) -> int:
    """Return how many samples a rank has consumed in an epoch, at most ``share`` (the number assigned to the rank)."""
    if state["epoch"] == epoch:
        return state["consumed"]
    return share if state["epoch"] > epoch else 0


def _share(size: int, rank: int, replicas: int) -> int:
    return -(-(size - rank) // replicas)
