"""``torch_default``: torch's own ``DefaultStager``, for comparison and for migration."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch.distributed.checkpoint import staging

from stagereg.errors import StagerClosedError, StagingError
from stagereg.registry import register
from stagereg.stagers.async_stager import AsyncStager, StateDict


@register("stager", "torch_default")
class TorchDefaultStager(AsyncStager):
    """Wraps torch's ``DefaultStager``. Invalid options and use after ``close()`` raise the errors of other stagers.

    ``DefaultStager`` breaks guarantees of ``AsyncStager`` (torch 2.13). The next ``stage`` silently overwrites a copy
    that is still being written to storage, so wait for that write first. With ``use_async_staging``, training must not
    change tensors until the future is done. A view is copied with its whole storage. Staging a tensor that was resized
    in place (``resize_``) raises ``AssertionError``.

    Args:
        use_pinned_memory: use page-locked memory for copies. By default, only if an accelerator is available.
        use_shared_memory: use shared memory for copies (a file descriptor per tensor), for a writer in another process.
        use_async_staging: copy on another thread, so that ``stage`` returns a future. By default, only if an
            accelerator is available.
        use_non_blocking_copy: copy asynchronously from the accelerator. By default, only if an accelerator is
            available. ``True`` without an accelerator is an error, as in torch.

    Raises:
        StagingError: torch rejects these options on this machine.
    """

    def __init__(
        self,
        use_pinned_memory: bool | None = None,
        use_shared_memory: bool = False,
        use_async_staging: bool | None = None,
        use_non_blocking_copy: bool | None = None,
    ) -> None:
        there = torch.accelerator.is_available()
        self.options = staging.StagingOptions(
            use_pinned_memory=there if use_pinned_memory is None else use_pinned_memory,
            use_shared_memory=use_shared_memory,
            use_async_staging=there if use_async_staging is None else use_async_staging,
            use_non_blocking_copy=there if use_non_blocking_copy is None else use_non_blocking_copy,
        )
        self._closed = False
        try:
            self._stager = staging.DefaultStager(self.options)
        except (AssertionError, RuntimeError) as error:
            raise StagingError([], f"torch's DefaultStager rejects {self.options}: {error}") from error

    def stage(self, state_dict: StateDict) -> Future[StateDict] | StateDict:
        """Return torch's copy of ``state_dict``, or with ``use_async_staging`` a future of the copy.

        Raises:
            StagerClosedError: the stager is closed.
            Exception: errors of torch propagate; with ``use_async_staging``, the future raises them.
        """
        if self._closed:
            raise StagerClosedError
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete. Raises the error of the copy."""
        if not self._closed:
            self._stager.synchronize_staging()

    def close(self) -> None:
        """Free torch's copies and thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._stager.close()
