"""``torch_default``: torch's own ``DefaultStager``, to compare with and to migrate from."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch.distributed.checkpoint import staging

from stagereg.errors import StagerClosedError, StagingError
from stagereg.registry import register
from stagereg.stagers.async_stager import AsyncStager, StateDict


@register("stager", "torch_default")
class TorchDefaultStager(AsyncStager):
    """torch's ``DefaultStager``, unchanged; only what is refused, and when, is as with the other stagers.

    It breaks promises of ``AsyncStager`` (torch 2.13). The next ``stage`` overwrites a copy that is still being
    written, and no error is raised: wait for the write first. With ``use_async_staging``, training must not write until
    the future is done. A view costs its whole storage. A tensor resized in place (``resize_``) is an
    ``AssertionError``.

    Args:
        use_pinned_memory: page-lock the copies; None means where an accelerator is available.
        use_shared_memory: put the copies into shared memory, one file descriptor each. False by default, as that is
            only of use to a writer in another process.
        use_async_staging: copy on another thread, ``stage`` returning a future; None means where an accelerator is
            available.
        use_non_blocking_copy: queue the copies from the accelerator; None means where one is available. True without
            one is an error, as in torch.

    Raises:
        StagingError: torch refuses these options on this machine.
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
        """Return torch's copy of ``state_dict``, or a future of it with ``use_async_staging``.

        Raises:
            StagerClosedError: after ``close()``.
            Exception: what torch raises, unchanged; with ``use_async_staging`` it is in the future.
        """
        if self._closed:
            raise StagerClosedError
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Return when the last copy is complete; raise what went wrong with it."""
        if not self._closed:
            self._stager.synchronize_staging()

    def close(self) -> None:
        """Free torch's copies and thread. Twice is harmless."""
        if not self._closed:
            self._closed = True
            self._stager.close()
