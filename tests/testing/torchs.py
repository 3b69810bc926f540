"""torch's own stagers under the contract, and the table of ``docs/contracts.md`` that shows what they keep.

Options that need an accelerator are left off, so the table is the same on a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from stagereg.registry import build
from stagereg.testing import Contract, StagerContract

__all__ = ["TORCHS", "table"]


class Unpinned(BlockingAsyncStager):
    """Its cache is not page-locked. torch page-locks it whether there is an accelerator or not, which fails without."""

    def stage(self, state_dict: Any) -> Any:
        if self.state_dict_cache is None:
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        return super().stage(state_dict)


def held_to(name: str, make: Callable[..., Any], *args: Any, **options: Any) -> type[StagerContract]:
    """The contract of what ``make`` makes; ranks find it by its name."""
    facts = {"make": lambda self: make(*args, **options), "__module__": __name__}
    contract = globals()[name] = type(name, (StagerContract,), facts)
    return contract


PLAIN = dict.fromkeys(("use_pinned_memory", "use_async_staging", "use_non_blocking_copy"), False)
TORCHS: dict[str, type[StagerContract]] = {
    "`BlockingAsyncStager`": held_to("Blocking", BlockingAsyncStager),
    "the same, cached": held_to("Cached", Unpinned, cache_staged_state_dict=True),
    "`DefaultStager`": held_to("Default", DefaultStager, StagingOptions(False, False, False, False)),
    "the same, async": held_to("DefaultAsync", DefaultStager, StagingOptions(False, False, True, False)),
    "`torch_default`": held_to("TorchDefault", build, "stager", "torch_default", **PLAIN),
}


def table(kinds: Mapping[str, type[Contract]]) -> str:
    """A line of Markdown for each promise: "yes", "**no**", or "-" where it could not be tried."""
    promises = {name: text for kind in kinds.values() for name, text in kind.promises().items()}
    rows = [["promise", *kinds], ["---"] * (len(kinds) + 1)]
    for name, text in promises.items():
        kept = [kind.outcome(name).kept for kind in kinds.values()]
        rows.append([text.rstrip("."), *({None: "-", True: "yes", False: "**no**"}[each] for each in kept)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
