"""Checks the manifest and the file sizes of checkpoints. Any process may call these functions, without a lock.

Symbolic links are not followed: each file of a checkpoint must be a regular file inside the checkpoint's directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from stagereg.checkpoint.format.damage import InaccessibleFile, VerificationResult, damage_of, differences
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, Checkpoint, Manifest, step_of
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.foreign import TORCH, is_foreign, look_at_foreign
from stagereg.errors import MALFORMED

_LEFTOVER = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")
_MANIFEST_BYTES = 1 << 28  # size limit of a manifest, which has some hundred bytes per file


def look(backend: Backend, path: str) -> VerificationResult:
    """Check the manifest and the file sizes of the checkpoint at ``path``, which may be a checkpoint of plain torch."""
    try:
        return _settled(lambda: [_look(backend, backend.resolve(path))])[0]
    except OSError as error:
        return VerificationResult(path, None, {MANIFEST: InaccessibleFile(f"cannot be accessed ({error})")})


def sizes(backend: Backend, path: str, files: Iterable[str] = ()) -> dict[str, int | str]:
    """Map each name in a directory to its size in bytes, or to an error message; see :meth:`.Backend.list`."""
    return {name: "not a regular file" if size is None else size for name, size in backend.list(path, files).items()}


def conditions(backend: Backend) -> list[VerificationResult]:
    """Check all directories that are named ``step-N``, except :func:`leftovers` and :func:`of_torch`."""
    return [each for each in _steps(backend) if not _is_begun(backend, each) and not each.writer]


def of_torch(backend: Backend, every: bool = False) -> list[VerificationResult]:
    """Return the checkpoints that plain torch wrote: those named ``step-N``, or all if ``every`` is set.

    The list is empty if no extension is installed that reads such directories (:mod:`.foreign`).
    """
    names = [name for name, size in backend.list(backend.root).items() if size is None and not name.startswith(".")]
    looked = [_look(backend, f"{backend.root}/{name}") for name in names if every or step_of(name) is not None]
    return [each for each in looked if each.writer and each.manifest is not None]


def leftovers(backend: Backend) -> list[str]:
    """Return the paths of unfinished saves. They belong to killed runs, or to a run that is saving now."""
    if backend.in_place:
        return sorted(each.path for each in _steps(backend) if _is_begun(backend, each))
    return sorted(f"{backend.root}/{name}" for name in backend.list(backend.root) if _LEFTOVER.fullmatch(name))


def complete(found: list[VerificationResult]) -> list[Checkpoint]:
    """Return the complete checkpoints, newest first. A checkpoint with two names is listed by its shorter name."""
    those = [each.checkpoint for each in found if each.checkpoint is not None]
    those.sort(key=lambda each: (each.manifest.order, -len(each.name)))
    return [*{each.key: each for each in those}.values()][::-1]


def _steps(backend: Backend) -> list[VerificationResult]:
    def look_at_all() -> list[VerificationResult]:
        there = backend.list(backend.root).items()
        names = {name for name, size in there if size is None and step_of(name) is not None}
        newest = backend.resolve(f"{backend.root}/{LATEST}").rpartition("/")[2] if backend.in_place else ""
        if step_of(newest) is not None:
            names.add(newest)  # an eventually consistent listing may lack the newest checkpoint
        return [_look(backend, f"{backend.root}/{name}", reads_torch=False) for name in names]

    return _settled(look_at_all)


def _is_begun(backend: Backend, each: VerificationResult) -> bool:
    """Return whether a directory is an unfinished save: it has no manifest, and its name has a random suffix."""
    return backend.in_place and each.damages == {MANIFEST: "missing"} and "." in each.name


def _settled(look: Callable[[], list[VerificationResult]]) -> list[VerificationResult]:
    """Repeat a check with errors until two results are equal: a run may change checkpoints during the check."""
    found = look()
    while any(each.damages for each in found) and (again := look()) != found:
        found = again
    return found


def _look(backend: Backend, path: str, reads_torch: bool = True) -> VerificationResult:
    try:
        there = sizes(backend, path, [MANIFEST])
    except OSError as error:
        there = {MANIFEST: InaccessibleFile(f"cannot be accessed ({error})")}
    if is_foreign(path, there):
        return look_at_foreign(backend, path, there) if reads_torch else VerificationResult(path, None, {}, TORCH)
    found = _manifest(backend, path, there.get(MANIFEST, "missing"))
    if isinstance(found, str):
        return VerificationResult(path, None, {MANIFEST: found})
    wrong = differences(found, there)
    return VerificationResult(path, found, wrong and differences(found, sizes(backend, path, found.files)))


def _manifest(backend: Backend, path: str, there: int | str) -> Manifest | str:
    """Return the manifest in a directory, or an error message. ``there``: the manifest file's size, or an error."""
    if isinstance(there, str):
        return there
    if there > _MANIFEST_BYTES:
        return f"corrupt (it has {there:,} bytes)"
    try:
        manifest = Manifest.loads(backend.read(f"{path}/{MANIFEST}"))
    except OSError as error:
        return damage_of(error)
    except MALFORMED as error:
        return f"corrupt ({error})"
    named = step_of(path.rpartition("/")[2])
    return manifest if named in (None, manifest.step) else f"it belongs to step {manifest.step}"
