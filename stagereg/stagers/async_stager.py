"""The protocol of stagers, with torch's names.

The signatures match ``torch.distributed.checkpoint.staging.AsyncStager`` (torch 2.13). So stagers written for torch
work here, and these stagers work in ``torch.distributed.checkpoint.async_save(async_stager=...)``. :class:`AsyncStager`
specifies the behaviour that torch leaves open.
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
    3. ``synchronize_staging()``, if ``should_synchronize_after_execute``. Afterwards, the source may be written again.
    4. When the writer has written the copy, it drops its reference. Steps 1 to 3 may be repeated before this step.
    5. ``close()``, after the last checkpoint.

    Requirements for a stager:

    1. *Isolation.* Once staging is complete, later writes to the source do not change the copy.
    2. *In flight.* The memory of a copy does not change until its last tensor is freed.
    3. *Fidelity.* The copy has the source's structure, including objects with tensors, and its dtypes, strides, shared
       storage, placements and attributes. Lazy conjugation is resolved. A view costs its own bytes; a view with large
       holes, such as a column of a big matrix, is packed and loses its strides. A stager may change values and dtypes
       on purpose, but never the structure: keys, containers, shapes, types. A ``Checkpointer`` refuses such a change.
    4. *Change.* Keys, shapes and dtypes may differ between calls. A value that cannot be staged raises an error that
       contains its path.
    5. *End.* ``close()`` frees everything and is idempotent; later use raises an error. The next call, or ``close()``,
       raises the error of background work.

    A subclass must implement ``stage``. The other defaults suit a stager that has copied everything when ``stage``
    returns, except that ``should_synchronize_after_execute`` is True, as in torch.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether the checkpointer should call ``synchronize_staging`` immediately after the writer has started."""
        return self._synchronize_after_execute

    def stage(self, state_dict: StateDict) -> Future[StateDict] | StateDict:
        """Return a copy of ``state_dict`` in host memory, or a future of one. Called on the training thread."""
        raise NotImplementedError(f"{type(self).__name__} must implement stage(state_dict)")

    def synchronize_staging(self) -> None:
        """Wait until the copy of the last ``stage`` is complete. Raises the error of the copy if it failed."""
        return  # a body, so that type checkers do not treat the method as abstract

    def close(self) -> None:
        """Free all resources. Called at least once, after the last ``stage``. Idempotent."""
        return


# Optional features of stagers. A checkpointer checks for them with isinstance; a stager need not inherit them.


@runtime_checkable
class ReleasesCopies(Protocol):
    """A stager whose reader can release a copy explicitly."""

    def expect_release(self) -> None:
        """Declare that this reader releases each copy, so ``stage`` may wait longer. Call before the first copy."""

    def release(self, staged: StateDict) -> None:
        """End the use of a copy by its reader. Thread-safe.

        Clears ``staged``, the result of ``stage`` or of its future. The next ``stage`` does not wait for this copy.
        Other code may still use tensors of the copy: their memory is not reused before they are freed.
        """


@runtime_checkable
class ExpectsStage(Protocol):
    """A stager that allocates memory in the background if it is called before ``stage``."""

    def expect_stage(self) -> None:
        """Announce that ``stage`` will be called soon. Returns immediately. Called on the training thread, often."""


@runtime_checkable
class WatchesOptimizers(Protocol):
    """A stager that copies less before ``stage`` returns, if it knows an optimizer before its first step."""

    def watch(self, optimizer: Optimizer) -> None:
        """Register ``optimizer``, which is about to train the state that will be staged."""


@runtime_checkable
class ConfirmsCopies(Protocol):
    """A stager that copies while training continues, and later detects writes to the source during the copy."""

    def confirm(self) -> None:
        """Confirm complete copies. Called on the training thread, while it runs no operation of torch."""

    def copy_at_once(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """From now on, copy ``tensors`` before ``stage`` returns, instead of the tensors of the previous call.

        ``None`` means all tensors, in the next ``stage`` only.
        """


@runtime_checkable
class UnconfirmedCopy(Protocol):
    """The future of a :class:`ConfirmsCopies` stager. ``result`` returns when the source is known to be unchanged."""

    def copied(self) -> StateDict:
        """Return the copy as soon as its bytes are complete. Thread-safe."""

    def when_copied(self, call: Callable[[], object]) -> None:
        """Call ``call()``, on any thread, when the copy is complete or has failed. The caller then reads the result."""
