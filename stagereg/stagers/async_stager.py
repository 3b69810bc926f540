"""The protocol of stagers, under torch's names.

The signatures match ``torch.distributed.checkpoint.staging.AsyncStager`` (torch 2.13), so stagers written for torch
work here, and stagers written here work in ``torch.distributed.checkpoint.async_save(async_stager=...)``.
:class:`AsyncStager` specifies the behaviour that torch leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import Optimizer

StateDict: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of tensors and other values, as ``torch.distributed.checkpoint`` accepts them."""


@runtime_checkable
class AsyncStager(Protocol):
    """Makes copies of state dicts that training does not change.

    A checkpointer, or ``torch.distributed.checkpoint.async_save``, calls the methods in this order:

    1. ``stage(state_dict)`` on the training thread. It returns the copy, or a future of the copy.
    2. A writer starts to read the copy, on another thread or in another process.
    3. ``synchronize_staging()``, if ``should_synchronize_after_execute``. After it, the source may be written again.
    4. The writer drops the copy when it has been written. Steps 1 to 3 may be repeated before this step.
    5. ``close()``, after the last checkpoint.

    A stager promises:

    1. *Isolation.* Once staging is complete, later writes to the source do not change the copy.
    2. *In flight.* Memory of a copy does not change until its last tensor is freed, regardless of the holder.
    3. *Fidelity.* The copy has the source's structure, including objects with tensors, and its dtypes, strides, shared
       storage, placements and attributes. Lazy conjugation is resolved. A view costs its own bytes; a view with large
       holes, such as a column of a big matrix, is packed and loses its strides. A stager may change values and dtypes
       on purpose, but never the structure: keys, containers, shapes, types. A ``Checkpointer`` refuses such a change.
    4. *Change.* Keys, shapes and dtypes may differ between calls. Values that cannot be staged raise an error with
       their path.
    5. *End.* ``close()`` frees everything and is idempotent; later use raises an error. Errors of background work are
       raised by the next call and by ``close()``.

    A subclass must implement ``stage``. The defaults suit a stager that has finished when ``stage`` returns, except
    ``should_synchronize_after_execute``, which is True by default, as in torch.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether the checkpointer should call ``synchronize_staging`` right after the writer has started."""
        return self._synchronize_after_execute

    def stage(self, state_dict: StateDict) -> Future[StateDict] | StateDict:
        """Return a copy of ``state_dict`` in host memory, or a future of one. Called on the training thread."""
        raise NotImplementedError(f"{type(self).__name__} must implement stage(state_dict)")

    def synchronize_staging(self) -> None:
        """Return when the copy of the last ``stage`` is complete; raise its error if it failed."""
        return  # a body, so that type checkers do not treat the method as abstract

    def close(self) -> None:
        """Free everything. Called at least once, after the last ``stage``. Idempotent."""
        return


# Optional features of stagers. A checkpointer checks for them with isinstance; inheriting is not necessary.


@runtime_checkable
class ReleasesCopies(Protocol):
    """A stager whose reader can release a copy explicitly, instead of only dropping it."""

    def expect_release(self) -> None:
        """Promise that this reader releases each copy, so ``stage`` waits longer. Called before the first ``stage``."""

    def release(self, staged: StateDict) -> None:
        """End the reader's use of a copy. Thread-safe.

        Clears ``staged``, the result of ``stage`` or of its future. The next ``stage`` does not wait for this copy.
        Other holders of its tensors keep their memory, which is not reused before these tensors are freed.
        """


@runtime_checkable
class WatchesOptimizers(Protocol):
    """A stager that copies less before ``stage`` returns if it knows an optimizer before the optimizer's first step."""

    def watch(self, optimizer: Optimizer) -> None:
        """Register ``optimizer``, which is about to train the state that will be staged."""


@runtime_checkable
class ConfirmsCopies(Protocol):
    """A stager that copies while training continues, and determines later whether the source was written meanwhile."""

    def confirm(self) -> None:
        """Confirm complete copies. Called on the training thread, while it runs no operation of torch."""

    def copy_at_once(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """From now on, copy ``tensors`` before ``stage`` returns, instead of the tensors of the previous call.

        ``None`` means all tensors, in the next ``stage`` only.
        """


@runtime_checkable
class UnconfirmedCopy(Protocol):
    """The future of a :class:`ConfirmsCopies`. ``result`` returns when it is known that the source was not written."""

    def copied(self) -> StateDict:
        """Return the copy when its bytes are complete. Thread-safe."""

    def when_copied(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when the copy is complete or has failed, on any thread. The caller then reads the outcome."""
