"""Detects checkpoints in formats of other programs. The module ``foreign`` of an extension reads such formats.

Retention does not count, replace or delete directories in other formats, even if an extension can read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stagereg.base.providers import providers
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import CHECKSUMS, MANIFEST, METADATA, plain_name, step_of
from stagereg.checkpoint.store.backend import Backend

TORCH = "torch"
"""``VerificationResult.writer`` for directories that torch wrote, which have no checksums."""
_INDEX = "index.json"  # not imported from `format.index`, which imports torch


def is_foreign(path: str, names: Collection[str]) -> bool:
    """Return whether plain torch wrote a directory, according to the directory's name and its file names."""
    name = path.rpartition("/")[2]
    has_token = step_of(name) is not None and name != plain_name(name)
    return not has_token and not {MANIFEST, _INDEX} & {*names} and bool({METADATA, CHECKSUMS} & {*names})


def look_at_foreign(backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
    """Check another program's checkpoint. If no extension can read its format, the result has no manifest.

    ``there``: the file sizes by name.
    """
    for each in providers("foreign"):
        return each.look(backend, path, there)
    return VerificationResult(path, None, {MANIFEST: "missing"}, TORCH)


def expect_no_other_format(path: str) -> None:
    """Raise ``CheckpointError`` if ``path`` is in another program's format; the message shows how to load it."""
    for each in providers("foreign"):
        each.expect_none(path)
