"""torch's own stagers, held to the contract: ``python -m stagereg.testing.torchs`` prints which promises they keep.

What it prints is the table in ``docs/contracts.md``. The stagers are torch's, unchanged; options that need an
accelerator are left off, so the table is the same on a machine without one.
"""

from __future__ import annotations

from typing import Any

from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from stagereg.registry import build
from stagereg.stagers.async_stager import AsyncStager
from stagereg.testing.contract import table
from stagereg.testing.stager import StagerContract

__all__ = ["TORCHS"]


class Blocking(StagerContract):
    """``BlockingAsyncStager()``."""

    def make(self) -> AsyncStager:
        return BlockingAsyncStager()


class Unpinned(BlockingAsyncStager):
    """``BlockingAsyncStager(cache_staged_state_dict=True)`` with a cache that is not page-locked.

    torch page-locks it whether there is an accelerator or not, which fails without one.
    """

    def __init__(self) -> None:
        super().__init__(cache_staged_state_dict=True)

    def stage(self, state_dict: Any) -> Any:
        """As torch's, over a cache that is made here."""
        if self.state_dict_cache is None:
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        return super().stage(state_dict)


class Cached(StagerContract):
    """``BlockingAsyncStager(cache_staged_state_dict=True)``."""

    def make(self) -> AsyncStager:
        return Unpinned()


class Default(StagerContract):
    """``DefaultStager``, as ``async_save`` makes one."""

    def make(self) -> AsyncStager:
        return DefaultStager(StagingOptions(False, False, False, False))


class DefaultAsync(StagerContract):
    """``DefaultStager`` with ``use_async_staging``."""

    def make(self) -> AsyncStager:
        return DefaultStager(StagingOptions(False, False, True, False))


class TorchDefault(StagerContract):
    """stagereg's ``torch_default``."""

    def make(self) -> AsyncStager:
        options = {"use_pinned_memory": False, "use_async_staging": False, "use_non_blocking_copy": False}
        stager: AsyncStager = build("stager", "torch_default", **options)
        return stager


TORCHS: dict[str, type[StagerContract]] = {
    "`BlockingAsyncStager`": Blocking,
    "the same, cached": Cached,
    "`DefaultStager`": Default,
    "the same, async": DefaultAsync,
    "`torch_default`": TorchDefault,
}
"""Their contracts, by the headings of the table."""

if __name__ == "__main__":
    print(table(TORCHS))
