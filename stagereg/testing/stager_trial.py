"""How a promise of a stager is tried: on a fresh stager, called as torch calls one, within a bounded time.

A copy is compared with what it has to be in types, order of keys, dtypes, shapes, strides, ``requires_grad`` and every
bit of every tensor, so NaN is equal to itself and minus zero is not zero; values that are no tensors with ``==``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stagereg.base.machine import memory
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.testing.contract import Contract, Outcome
from stagereg.testing.worker import is_rank

S = TypeVar("S", bound="StagerTrial")

_SIZES = (1, 7, 1000, 1024, 1025, 2**14, 2**14 + 1, 2**20 + 1)  # of float32: around a page, 64 KiB and 4 MiB

_MEANT = "; if it changes that on purpose, its contract says so: expected(tensor, path) returns the copy to be"


class StagerTrial(Contract):
    """What the author of a stager overrides, and what the promises (``stager``) are written with."""

    device: ClassVar[str] = "cpu"  # of the tensors that are staged; copies must be in host memory

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            if name.startswith("test_") and callable(method):
                setattr(cls, name, _bounded(method))

    def make(self) -> AsyncStager:
        """Return a fresh stager. Called once or more for each promise; the contract closes what it gets."""
        raise NotImplementedError(f"{type(self).__name__} must implement make(), which returns a fresh stager")

    def expected(self, tensor: Tensor, path: str) -> Tensor:
        """Return what the copy of ``tensor`` is to be; override it for a stager that changes dtypes or values.

        ``path`` is its dotted name in the state dict: ``"optimizer.state.0.exp_avg"``.
        """
        return tensor

    def opened(self) -> AsyncStager:
        """Return a fresh stager that is closed when the promise has been tried."""
        stager = self.make()
        self._stagers.append(stager)
        return stager

    def close(self) -> None:
        """Close what was opened, and keep no reference; how a stager closes is for one promise to judge."""
        while self._stagers:
            with contextlib.suppress(Exception):
                self._stagers.pop().close()

    def settled(self, stager: AsyncStager, state: StateDict) -> Any:
        """Stage ``state`` and return the copy when staging is complete; the source may be written again then."""
        staged = stager.stage(state)
        if isinstance(staged, Future):
            return staged.result()
        if stager.should_synchronize_after_execute:
            stager.synchronize_staging()
        return staged

    def noted(self, state: StateDict) -> Any:
        """Return ``state`` as it is now, for :meth:`agree`; later writes do not show in it."""
        return copy.deepcopy(state)

    def agree(self, copied: Any, noted: Any, when: str) -> None:
        """Say that the promise is broken where a copy is not what :meth:`noted` noted; ``when`` begins the message."""
        if wrong := difference(copied, noted, self.expected):
            self.broken(f"{when}, {wrong}")

    @contextlib.contextmanager
    def kept(self, stager: AsyncStager, state: StateDict, when: str) -> Iterator[Any]:
        """Stage ``state``; at the end of the ``with`` block the copy has to agree with what it was."""
        noted = self.noted(state)
        copied = self.settled(stager, state)
        yield copied
        self.agree(copied, noted, when)

    def faithful(self, stager: AsyncStager, state: StateDict, when: str = "at once") -> Any:
        """Stage ``state`` and return the copy, which has to agree with it."""
        with self.kept(stager, state, when) as copied:
            return copied

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def counted(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.float32, device=self.device)

    def grows_at_most(self, limit: int, use: Callable[[], None], what: str) -> None:
        """Measure by how much ``use`` makes the process grow; twice if that is too much, for others allocate too."""
        for _ in range(2):
            self.settled(self.opened(), {"w": self.ones(10)})
            gc.collect()
            before = memory("VmRSS")
            use()
            gc.collect()
            grown = memory("VmRSS") - before
            if grown <= limit:
                return
        self.broken(f"after {what}, the process has {grown >> 20} MiB more")

    def sized(self, value: int = 0) -> StateDict:
        """Return tensors of sizes around a page, 64 KiB and 4 MiB, nested and not, filled as :meth:`fill` does."""
        flat, inner = ({f"{4 * n} bytes": self.ones(n) for n in _SIZES} for _ in range(2))
        return self.fill({**flat, "0-d": self.ones(), "nested": [{"inner": inner}, self.ones()]}, value)

    def fill(self, state: StateDict, value: int) -> StateDict:
        """Fill the tensors of ``state`` with numbers of their own, which are others for each ``value``; return it."""
        tensors = tree_leaves(state)
        for i, x in enumerate(tensors):
            x.fill_(value * len(tensors) + i)
        return state

    @functools.cached_property
    def _stagers(self) -> list[AsyncStager]:  # pytest collects no class that has a constructor
        return []


def on_a_rank(method: Callable[[S], None]) -> Callable[[S], None]:
    """Try a promise in a process of its own, in a process group of one. The contract must be at the top of a module."""
    vars(method)["on_a_rank"] = True
    return method


def _bounded(method: Callable[[S], None]) -> Callable[[S], None]:
    """Try a promise on a thread with a time limit, without warnings, and close its stagers at the end."""

    def tried(self: S) -> None:
        with contextlib.closing(self):
            method(self)

    @functools.wraps(method)
    def attempt(self: S) -> None:
        if "on_a_rank" in vars(method) and not is_rank():
            what = "tried in a process of its own, "
            (outcome,) = self.on_ranks(what, 1, _outcome, type(self), method.__name__)
            if outcome.kept is False:
                self.broken(outcome.seen)
            return
        # The filters are the process's, so they are changed where they come back even if the trial does not.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _frozen():
                self.within(lambda: tried(self))

    return attempt


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Let ``gc.collect()``, which a stager may call whenever it waits, visit only what a trial has made."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _outcome(rank: int, world_size: int, kind: type[Contract], name: str) -> Outcome:
    return kind.outcome(name)


def difference(
    copied: Any,
    source: Any,
    expected: Callable[[Tensor, str], Tensor] = lambda tensor, path: tensor,
    where: str = "copy",
    path: tuple[object, ...] = (),
) -> str | None:
    """Return the first difference between a copy and its source, with its path; ``None`` if there is none.

    ``expected`` makes of a source tensor and its dotted name what its copy is to be; its strides count where the shape
    is another one.
    """
    if type(copied) is not type(source):
        return f"{where} is a {type(copied).__name__}, and the source a {type(source).__name__}"
    if isinstance(source, Tensor):
        tensor = expected(source.detach(), ".".join(map(str, path)))
        return _tensor_difference(copied, source, tensor.detach().cpu(), where)
    if not isinstance(source, (dict, list, tuple)):
        return None if copied == source else f"{where} is {copied!r}, not {source!r}"
    keys, wanted = (list(x) if isinstance(x, dict) else list(range(len(x))) for x in (copied, source))
    if keys != wanted:
        return f"the keys of the {where} are {keys}, not {wanted}"
    found = (difference(copied[key], source[key], expected, f"{where}[{key!r}]", (*path, key)) for key in keys)
    return next((each for each in found if each), None)


def _tensor_difference(copied: Tensor, source: Tensor, wanted: Tensor, where: str) -> str | None:
    stride = (source if wanted.shape == source.shape else wanted).stride()
    seen = (copied.device.type, copied.dtype, tuple(copied.shape), copied.stride(), copied.requires_grad)
    right = ("cpu", wanted.dtype, tuple(wanted.shape), stride, source.requires_grad)
    for what, is_, was in zip(("device", "dtype", "shape", "strides", "requires_grad"), seen, right, strict=True):
        if is_ != was:
            return f"{where} has the {what} {is_}, not {was}{_MEANT if what in ('dtype', 'shape') else ''}"
    # Not contiguous(), which leaves odd strides alone where there is one element.
    have, want = (x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in (copied, wanted))
    if torch.equal(have.view(torch.uint8), want.view(torch.uint8)):
        return None
    wrong = (have.view(torch.uint8) != want.view(torch.uint8)).view(-1, have.element_size()).any(1).nonzero().flatten()
    at = int(wrong[0])
    numbers = f"element {at} is {have[at].item()}, not {want[at].item()}"
    return f"{len(wrong)} of {copied.numel()} elements of {where} are wrong: {numbers}"
