"""Detection of checkpoints in the formats of other programs, and the protocol of their readers.

The store does not count, replace or delete directories in other formats, even if an extension can read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from stagereg.base.providers import providers
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import CHECKSUMS, MANIFEST, METADATA, plain_name, step_of
from stagereg.checkpoint.store.backend import Backend

TORCH = "torch"
"""``VerificationResult.writer`` for directories that torch wrote, which have no checksums."""
_INDEX = "index.json"  # not imported from `format.index`, which imports torch


class ForeignFormat(Protocol):
    """Reads checkpoints of other programs. Extensions list their readers in ``FORMATS`` of their module ``foreign``."""

    def look(self, backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
        """Check another program's directory, and return a result with a manifest; ``there`` is its listing."""
        ...

    def expect_none(self, path: str) -> None:
        """Raise ``CheckpointError``, with the code that loads ``path``, if it is in another program's format."""
        ...


def foreign_formats() -> Iterator[ForeignFormat]:
    """Yield the formats that the installed extensions read."""
    for module in providers("foreign"):
        yield from module.FORMATS


def is_foreign(path: str, names: Collection[str]) -> bool:
    """Return whether torch wrote a directory with these files. Names with a token belong to a ``Checkpointer``."""
    name = path.rpartition("/")[2]
    has_token = step_of(name) is not None and name != plain_name(name)
    return not has_token and not {MANIFEST, _INDEX} & {*names} and bool({METADATA, CHECKSUMS} & {*names})


def look_at_foreign(backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
    """Check another program's directory; without an extension that reads it, the result has no manifest."""
    for each in foreign_formats():
        return each.look(backend, path, there)
    return VerificationResult(path, None, {MANIFEST: "missing"}, TORCH)


def expect_no_other_format(path: str) -> None:
    """Raise ``CheckpointError``, with the code that loads ``path``, if it is in another program's format."""
    for each in foreign_formats():
        each.expect_none(path)
