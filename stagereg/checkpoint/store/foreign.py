"""Checkpoints of other formats in a directory: which programs wrote them, and the protocol of their readers.

The store counts, replaces and deletes no directory of another format, whether an extension can read that format or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from stagereg.base.providers import providers
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import CHECKSUMS, MANIFEST, METADATA, plain_name, step_of
from stagereg.checkpoint.store.backend import Backend

TORCH = "torch"
"""The writer of a directory that has no checksums, as a :class:`.VerificationResult` names the writer."""
_INDEX = "index.json"  # as in `format.index`, which imports torch


class ForeignFormat(Protocol):
    """Reads checkpoints of other programs. An extension offers objects in ``FORMATS`` of its module ``foreign``."""

    def look(self, backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
        """Return the condition, with a manifest, of another program's directory; ``there`` is its listing."""
        ...

    def expect_none(self, path: str) -> None:
        """Raise ``CheckpointError`` if a path is in another format, with the code that loads it."""
        ...


def foreign_formats() -> Iterator[ForeignFormat]:
    """Yield the formats that the installed extensions read."""
    for module in providers("foreign"):
        yield from module.FORMATS


def is_foreign(path: str, names: Collection[str]) -> bool:
    """Whether torch wrote a directory with these files. A name with a token belongs to a ``Checkpointer``'s save."""
    name = path.rpartition("/")[2]
    has_token = step_of(name) is not None and name != plain_name(name)
    return not has_token and not {MANIFEST, _INDEX} & {*names} and bool({METADATA, CHECKSUMS} & {*names})


def look_at_foreign(backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
    """Return the condition of another program's directory; without a reader extension there is no checkpoint."""
    for each in foreign_formats():
        return each.look(backend, path, there)
    return VerificationResult(path, None, {MANIFEST: "missing"}, TORCH)


def expect_no_other_format(path: str) -> None:
    """Raise ``CheckpointError`` if a path is in another format, with the code that loads it."""
    for each in foreign_formats():
        each.expect_none(path)
