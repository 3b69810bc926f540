"""Helpers for tests of a stager. They call a new stager as torch does, with a time limit, and compare copies.

The comparison includes types, order of keys, dtypes, shapes, strides, ``requires_grad`` and every bit of every tensor,
so NaN equals NaN, and minus zero differs from zero. Values that are not tensors are compared with ``==``.
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

_SIZES = (1, 7, 1000, 1024, 1025, 2**14, 2**14 + 1, 2**20 + 1)  # float32 elements; near one page, 64 KiB and 4 MiB

_MEANT = ". If the stager changes this on purpose, override expected(tensor, path), which returns the expected copy"


class StagerTrial(Contract):
    """Base class of stager tests: methods that the author of a stager may override, and helpers of the tests."""

    device: ClassVar[str] = "cpu"  # device of the source tensors; copies must always be in host memory

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            if name.startswith("test_") and callable(method):
                setattr(cls, name, _bounded(method))

    def make(self) -> AsyncStager:
        """Return a new stager. Called at least once per test. The contract closes the stager."""
        raise NotImplementedError(f"{type(self).__name__} must implement make(), which returns a new stager")

    def expected(self, tensor: Tensor, path: str) -> Tensor:
        """Return the expected copy of ``tensor``. Override this method for a stager that changes dtypes or values.

        ``path`` is the tensor's dotted name in the state dict: ``"optimizer.state.0.exp_avg"``.
        """
        return tensor

    def opened(self) -> AsyncStager:
        """Return a new stager. The contract closes it after the test."""
        stager = self.make()
        self._stagers.append(stager)
        return stager

    def close(self) -> None:
        """Close all opened stagers, and drop the references. Ignores errors, because a separate test checks close()."""
        while self._stagers:
            with contextlib.suppress(Exception):
                self._stagers.pop().close()

    def settled(self, stager: AsyncStager, state: StateDict) -> Any:
        """Stage ``state``, wait until the copy is complete, and return the copy."""
        staged = stager.stage(state)
        if isinstance(staged, Future):
            return staged.result()
        if stager.should_synchronize_after_execute:
            stager.synchronize_staging()
        return staged

    def noted(self, state: StateDict) -> Any:
        """Return a deep copy of ``state``, for a later comparison with :meth:`agree`."""
        return copy.deepcopy(state)

    def agree(self, copied: Any, noted: Any, when: str) -> None:
        """Raise ``BrokenPromiseError`` if a copy differs from the result of :meth:`noted`. ``when`` begins the text."""
        if wrong := difference(copied, noted, self.expected):
            self.broken(f"{when}, {wrong}")

    @contextlib.contextmanager
    def kept(self, stager: AsyncStager, state: StateDict, when: str) -> Iterator[Any]:
        """Stage ``state`` and yield the copy. After the ``with`` block, check that the copy has not changed."""
        noted = self.noted(state)
        copied = self.settled(stager, state)
        yield copied
        self.agree(copied, noted, when)

    def faithful(self, stager: AsyncStager, state: StateDict, when: str = "at once") -> Any:
        """Stage ``state``, check that the copy equals ``state``, and return the copy."""
        with self.kept(stager, state, when) as copied:
            return copied

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def counted(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.float32, device=self.device)

    def grows_at_most(self, limit: int, use: Callable[[], None], what: str) -> None:
        """Check that ``use()`` allocates at most ``limit`` bytes. Retry once, because other threads allocate, too."""
        for _ in range(2):
            self.settled(self.opened(), {"w": self.ones(10)})
            gc.collect()
            before = memory("VmRSS")
            use()
            gc.collect()
            grown = memory("VmRSS") - before
            if grown <= limit:
                return
        self.broken(f"after {what}, the process uses {grown >> 20} MiB more")

    def sized(self, value: int = 0) -> StateDict:
        """Return a nested state of tensors of many sizes, filled by :meth:`fill`."""
        flat, inner = ({f"{4 * n} bytes": self.ones(n) for n in _SIZES} for _ in range(2))
        return self.fill({**flat, "0-d": self.ones(), "nested": [{"inner": inner}, self.ones()]}, value)

    def fill(self, state: StateDict, value: int) -> StateDict:
        """Fill each tensor of ``state`` with a number unique to the tensor and to ``value``. Return ``state``."""
        tensors = tree_leaves(state)
        for i, x in enumerate(tensors):
            x.fill_(value * len(tensors) + i)
        return state

    @functools.cached_property
    def _stagers(self) -> list[AsyncStager]:  # A property, because pytest ignores test classes with a constructor.
        return []


def on_a_rank(method: Callable[[S], None]) -> Callable[[S], None]:
    """Run the decorated test in a separate process with a process group. Its class must be defined at module level."""
    vars(method)["on_a_rank"] = True
    return method


def _bounded(method: Callable[[S], None]) -> Callable[[S], None]:
    """Run the decorated test on a thread with a time limit and without warnings, and close its stagers at the end."""

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
        # Warning filters are global. Change them on this thread, which restores them even if the test thread hangs.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _frozen():
                self.within(lambda: tried(self))

    return attempt


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Limit ``gc.collect()`` to objects created by the test, because stagers may call it often while they wait."""
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
    """Return a description of the first difference between a copy and its source, or ``None`` if they are equal.

    ``expected(tensor, path)`` returns the expected copy of a source tensor with the dotted name ``path``. The copy must
    have the strides of the source, or, if the shape of the expected copy differs, the strides of the expected copy.
    """
    if type(copied) is not type(source):
        return f"{where} is a {type(copied).__name__}, but the source is a {type(source).__name__}"
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
    # clone() is used, because contiguous() keeps unusual strides of tensors with one element.
    have, want = (x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in (copied, wanted))
    if torch.equal(have.view(torch.uint8), want.view(torch.uint8)):
        return None
    wrong = (have.view(torch.uint8) != want.view(torch.uint8)).view(-1, have.element_size()).any(1).nonzero().flatten()
    at = int(wrong[0])
    numbers = f"element {at} is {have[at].item()}, not {want[at].item()}"
    return f"{len(wrong)} of {copied.numel()} elements of {where} differ: {numbers}"
