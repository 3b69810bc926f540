"""torch's own stagers under the contract, and the table of ``docs/contracts.md`` that shows what they keep.

Options that need an accelerator are left off, so the table is the same on a machine without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from stagereg.registry import build
from stagereg.testing import Contract, StagerContract

__all__ = ["TORCHS", "table"]


class Blocking(StagerContract):
    def make(self) -> Any:
        return BlockingAsyncStager()


class Unpinned(BlockingAsyncStager):
    """Its cache is not page-locked. torch page-locks it whether there is an accelerator or not, which fails without."""

    def stage(self, state_dict: Any) -> Any:
        if self.state_dict_cache is None:
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        return super().stage(state_dict)


class Cached(StagerContract):
    def make(self) -> Any:
        return Unpinned(cache_staged_state_dict=True)


class Default(StagerContract):
    def make(self) -> Any:
        return DefaultStager(StagingOptions(False, False, False, False))


class DefaultAsync(StagerContract):
    def make(self) -> Any:
        return DefaultStager(StagingOptions(False, False, True, False))


class TorchDefault(StagerContract):
    def make(self) -> Any:
        options = dict.fromkeys(("use_pinned_memory", "use_async_staging", "use_non_blocking_copy"), False)
        return build("stager", "torch_default", **options)


TORCHS: dict[str, type[StagerContract]] = {
    "`BlockingAsyncStager`": Blocking,
    "the same, cached": Cached,
    "`DefaultStager`": Default,
    "the same, async": DefaultAsync,
    "`torch_default`": TorchDefault,
}


def table(kinds: Mapping[str, type[Contract]]) -> str:
    """A line of Markdown for each promise: "yes", "**no**", or "-" where it could not be tried."""
    promises = {name: text for kind in kinds.values() for name, text in kind.promises().items()}
    rows = [["promise", *kinds], ["---"] * (len(kinds) + 1)]
    for name, text in promises.items():
        kept = [kind.outcome(name).kept for kind in kinds.values()]
        rows.append([text.rstrip("."), *({None: "-", True: "yes", False: "**no**"}[each] for each in kept)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
