"""What a stager is, under torch's names.

The signatures are those of ``torch.distributed.checkpoint.staging.AsyncStager`` (torch 2.13), so a stager written for
torch is one here, and one written here goes into ``torch.distributed.checkpoint.async_save(async_stager=...)``.
What torch leaves open, the contract settles: see :class:`AsyncStager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import Optimizer

StateDict: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of tensors and other values, as ``torch.distributed.checkpoint`` takes them."""


@runtime_checkable
class AsyncStager(Protocol):
    """Makes a copy of a state dict that training cannot change any more.

    The order of calls, by a checkpointer or by ``torch.distributed.checkpoint.async_save``:

    1. ``stage(state_dict)`` on the training thread. It returns the copy, or a future of it.
    2. A writer starts to read the copy, on another thread or in another process.
    3. ``synchronize_staging()``, if ``should_synchronize_after_execute``. After it, the source may be written again.
    4. The writer drops the copy when it has written it. Steps 1 to 3 may come again before.
    5. ``close()``, after the last checkpoint.

    A stager promises:

    1. *Isolation.* Once staging is complete, no later write to the source shows in the copy.
    2. *In flight.* Memory handed out stays as it is until the last tensor of the copy is gone, whoever held it.
    3. *Fidelity.* The copy has the source's structure, objects with tensors included, dtypes, strides, shared storage,
       placements and attributes; lazy conjugation is carried out; a view costs its own bytes. Strides go where they
       would cost more: a view with large holes, such as a column of a big matrix, is packed. On purpose a stager may
       change values and dtypes, never the structure: keys, containers, shapes, types. A ``Checkpointer`` refuses that.
    4. *Change.* Keys, shapes and dtypes may differ from call to call. What cannot be staged is an error with its path.
    5. *End.* ``close()`` frees everything, twice is harmless, and use after it is an error. Errors of background work
       surface at the next call and at ``close()``.

    A subclass has to write ``stage``; the rest fits a stager that is done when ``stage`` returns, but for
    ``should_synchronize_after_execute``, which is True by default as in torch.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether the checkpointer is to call ``synchronize_staging`` right after the writer has started."""
        return self._synchronize_after_execute

    def stage(self, state_dict: StateDict) -> Future[StateDict] | StateDict:
        """Return a copy of ``state_dict`` in host memory, or a future of one. Called on the training thread."""
        raise NotImplementedError(f"{type(self).__name__} must implement stage(state_dict)")

    def synchronize_staging(self) -> None:
        """Return when the copy of the last ``stage`` is complete; raise what went wrong with it."""
        return  # a body, so that type checkers do not take the method for an abstract one

    def close(self) -> None:
        """Free everything. Called once or more, after the last ``stage``."""
        return


# What a stager may offer besides. A checkpointer asks with isinstance; a stager needs not inherit from these.


@runtime_checkable
class ReleasesCopies(Protocol):
    """A stager whose reader may say when it is done with a copy, instead of only dropping it."""

    def expect_release(self) -> None:
        """Wait longer for this reader, which promises to release each copy. Called before the first ``stage``."""

    def release(self, staged: StateDict) -> None:
        """End the reader's use of a copy, on any thread.

        Empties ``staged``, which is what ``stage`` or its future returned. The next ``stage`` does not wait for this
        copy any more. Whoever else holds tensors of it keeps their memory: it is not used again before they are gone.
        """


@runtime_checkable
class WatchesOptimizers(Protocol):
    """A stager that copies less at once if it knows an optimizer before its first step."""

    def watch(self, optimizer: Optimizer) -> None:
        """Take notice of ``optimizer``, which is about to train what will be staged."""


@runtime_checkable
class ConfirmsCopies(Protocol):
    """A stager that copies while training continues, and finds out later whether the source was written meanwhile."""

    def confirm(self) -> None:
        """Confirm the copies that are complete. Called on the training thread, which runs no operation of torch now."""

    def copy_at_once(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """Copy ``tensors`` before ``stage`` returns from now on, in place of those of the call before.

        ``None`` stands for everything in the next ``stage``.
        """


@runtime_checkable
class UnconfirmedCopy(Protocol):
    """A future of such a stager. Its ``result`` returns or raises when it is known whether the source was written."""

    def copied(self) -> StateDict:
        """Return the copy when its bytes are complete. Thread-safe."""

    def when_copied(self, call: Callable[[], object]) -> None:
        """Call ``call()`` then, or when the copy has failed; on any thread. The caller then asks for the outcome."""
