"""``proven``: retain proven checkpoints longer than others (``stagereg prove``)."""

from __future__ import annotations

from collections.abc import Mapping

from stagereg.base.providers import providers
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.errors import at_least
from stagereg.registry import register


@register("keep", "proven")
class KeepProven:
    """Retains the newest checkpoints that are not refuted, and the newest proven checkpoints.

    Args:
        newest: number of newest checkpoints to retain, at least 1. The newest of all counts even if it is refuted.
        proven: number of newest proven checkpoints to retain, at least 0.
    """

    def __init__(self, newest: int = 2, proven: int = 1) -> None:
        self.newest = at_least(1, "checkpoint.keep.newest", newest)
        self.proven = at_least(0, "checkpoint.keep.proven", proven)

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> dict[str, str]:
        """Return the paths of the checkpoints to retain, each with a reason."""
        store = open_parent_store(checkpoints[0].path if checkpoints else ".")
        looked = [VerificationResult(each.path, each.manifest) for each in checkpoints]
        verdicts = {each.path: "".join(one.verdict_of(store, each) for one in providers("notes")) for each in looked}
        lasting = [path for at, path in enumerate(verdicts) if at == 0 or not verdicts[path].startswith("refuted")]
        proven = [path for path in verdicts if verdicts[path] == "proven"][: self.proven]
        return dict.fromkeys(proven, "proven") | dict.fromkeys(lasting[: self.newest], "newest")
