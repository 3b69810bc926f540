"""Detects writes to an optimizer's tensors between its steps, by a layer in its forward or by the program.

For example, ``nn.Embedding(max_norm=...)`` renormalizes rows of its weight in its forward, a WGAN clamps the weights of
its critic, and programs reset codebooks. A copy of such a tensor cannot wait until the next step of the optimizer. A
:class:`StepObserver` compares version counters and byte samples after a step with those before the next step, during
the first steps of an optimizer. It also records writes that copies detect later.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

import torch
from torch.optim.optimizer import Optimizer

from stagereg.base.hooks import AFTER_STEPS, BEFORE_STEPS, LOADS
from stagereg.stagers.deferred_copy import SAMPLE_BYTES, sample_offsets, sampler
from stagereg.stagers.guard import written_by

_log = logging.getLogger(__name__)

_INTERVALS = 32  # number of intervals between steps to observe; afterwards, only copies detect writes
_LEAST_BYTES = 2**14  # smaller tensors in host memory are never copied in the background

Place = tuple[int, int]  # device index and address


class StepObserver:
    """Records writes to optimizers' tensors outside optimizer steps. Used on the training thread.

    ``written`` maps (device index, address) of each such write to the number of bytes. Entries are never removed.
    """

    def __init__(self) -> None:
        self.written: dict[Place, int] = {}
        self._expected: list[torch.Tensor] = []  # not weak: torch cannot swap tensors that have weak references
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._observed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # observed between two of their steps
        self._stepping: set[int] = set()
        self._intervals = 0
        self._before: _Moment | None = None
        of_steps = BEFORE_STEPS.add(self._before_step), AFTER_STEPS.add(self._after_step)
        self._removes = [*of_steps, LOADS.add(self._before_load)]

    def has_observed(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was observed between two of its steps."""
        return optimizer in self._observed

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Treat ``tensors`` as written between steps. Replaces the tensors of the previous call."""
        self._expected = [*tensors]

    def find(self, place: Place, nbytes: int) -> None:
        """Record that the memory at ``place`` is written between optimizer steps."""
        self.written[place] = max(nbytes, self.written.get(place, 0))

    def all_written(self) -> dict[Place, int]:
        """Return :attr:`written`, including the current memory of the tensors passed to :meth:`expect`."""
        for x in self._expected:
            for local in _plain(x):
                self.find((local.get_device(), local.data_ptr()), local.nbytes)
        return self.written

    def close(self) -> None:
        """Stop observing. Idempotent."""
        for remove in self._removes:
            remove()

    # Steps may be nested, because ZeroRedundancyOptimizer contains an optimizer. An interval is outside all steps.

    def _before_load(self, _: object) -> None:
        self._before = None

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        """Log errors instead of raising them, so that no optimizer step fails."""
        try:
            yield
        except Exception:
            self._before = None
            _log.debug("Cannot observe the tensors of an optimizer.", exc_info=True)

    def _before_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepping:  # the optimizer's last step raised
            self._stepping.clear()
        if not self._stepping and self._before is not None:
            before, self._before = self._before, None
            with self._observing():
                optimizers = before.optimizers()
                for x in before.written(_tensors_of(optimizers)):
                    self.find((x.get_device(), x.data_ptr()), x.nbytes)
                self._observed.update(optimizers)
                self._intervals += 1
        self._stepping.add(id(optimizer))

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepping.discard(id(optimizer))
        self._known.add(optimizer)
        if not self._stepping and (self._intervals < _INTERVALS or any(x not in self._observed for x in self._known)):
            with self._observing():
                self._before = _Moment(list(self._known))


def _tensors_of(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    return [x for each in optimizers for x in written_by(each) if not x.is_inference()]


class _Moment:
    """The state of optimizers' tensors after a step: version counters, and samples of tensors in host memory.

    Stores no reference to a tensor: a strong reference would keep memory alive, and torch cannot swap tensors that
    have weak references.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(each) for each in optimizers]
        tensors = _tensors_of(optimizers)
        self._versions = {_identity(x): x._version for x in tensors}
        self._sampled = [_identity(x) for x in tensors if x.is_cpu and x.nbytes >= _LEAST_BYTES and x.is_contiguous()]
        self._samples = _samples(self._sampled)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that have not been freed."""
        return [each for ref in self._optimizers if (each := ref()) is not None]

    def written(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, among ``tensors``, that were written after this moment."""
        now = {_identity(x): x for x in tensors}
        found = {key for key, version in self._versions.items() if key in now and now[key]._version != version}
        if now.keys() >= set(self._sampled):  # Without this check, some of the sampled memory may have been freed.
            pairs = zip(self._samples, _samples(self._sampled), strict=True)
            found |= {key for key, (old, new) in zip(self._sampled, pairs, strict=True) if old != new}
        return [now[key] for key in found]


_Identity = tuple[int, int, int]  # id, address and bytes of a tensor


def _identity(x: torch.Tensor) -> _Identity:
    return id(x), x.data_ptr(), x.nbytes


def _plain(x: torch.Tensor) -> list[torch.Tensor]:
    local = getattr(x, "_local_tensor", x)  # the local tensor of a DTensor
    return [local] if type(local) in (torch.Tensor, torch.nn.Parameter) else []


def _samples(tensors: Iterable[_Identity]) -> list[bytes]:
    """Return the byte samples of each tensor. All tensors must be dense and in host memory."""
    starts = [[address + at for at in sample_offsets(nbytes)] for _, address, nbytes in tensors]
    every = list(chain.from_iterable(starts))
    taken, ends = sampler(every, [SAMPLE_BYTES] * len(every))(), accumulate(SAMPLE_BYTES * len(each) for each in starts)
    return [taken[end - SAMPLE_BYTES * len(each) : end] for each, end in zip(starts, ends, strict=True)]
