"""``on_commit=copy_to``: copy each complete checkpoint to another checkpoint directory, a path or a URL.

The checksum of each file is verified during the copy, and again in the target. Like an unfinished save, an unfinished
copy has a temporary name, so it does not count as a checkpoint. If a run is killed during a copy, the next copy skips
files that are already complete in the target. If the target lacks earlier checkpoints, because a run was killed or the
target was unreachable, the next call copies them too, the oldest first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from itertools import takewhile

from stagereg.base.option_text import option
from stagereg.checkpoint.format.damage import WHOLE
from stagereg.checkpoint.format.manifest import MANIFEST, Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.storage.aligned import AlignedFile, make_buffers
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.open_store import backend_of, open_parent_store, open_store
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register

_BLOCK_BYTES = 1 << 23


@register("on_commit", "copy_to")
class CopyTo:
    """Copies each complete checkpoint to another checkpoint directory, and verifies the copy.

    Only one run at a time may write to the target. A checkpoint is not deleted while it is copied.

    Args:
        dir: the target, a path or a URL. Runs can restore from it like from any checkpoint directory.
        keep: the number of newest copies that are retained, or a retention rule: :class:`stagereg.Keep`, or a
            component of the kind ``keep``.

    Raises:
        ConfigError: fsspec does not support the protocol of the URL, or the package for it is not installed; or
            ``keep`` has ``weights_after``.
    """

    def __init__(self, dir: str, keep: int | Keep | KeepRule = Keep()) -> None:  # noqa: B008  # it cannot change
        self.dir, self.keep = dir, Keep.of(keep)
        if isinstance(keep, Keep) and keep.weights_after is not None:
            raise ConfigError(f"copy_to does not support {option('checkpoint.keep.weights_after')}: copies stay whole.")
        open_store(dir)

    def committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Copy the checkpoints that the target lacks and that ``keep`` retains.

        Raises:
            CheckpointError: a file in the source or in the copy does not match its checksum, so the checkpoint was not
                copied; or another run writes to the target. Also ``OSError``.
        """
        source, target = open_parent_store(checkpoint.path), open_store(self.dir)
        failed: list[CheckpointError] = []
        with target.lock():
            there = target.checkpoints()[0]
            missing = [*takewhile(lambda one: not any(_is_copy(each, one) for each in there), source.checkpoints()[0])]
            wanted = self.keep.select(missing, {one.path: one.manifest.metrics for one in missing})
            copies = {one.path: _place(one, target) for one in missing if one.path in wanted}
            target.sweep(but=copies.values())
            target.retention.spared.clear()
            for one in reversed([one for one in missing if one.path in wanted]):
                with source.readers.read_lease(one.path):
                    if source.look(one.path).manifest != one.manifest:
                        continue  # the checkpoint was deleted meanwhile
                    try:
                        self._copy(one, target, copies[one.path])
                    except CheckpointError as error:  # later checkpoints may be valid
                        failed.append(error)
        if failed:
            raise failed[0]

    def _copy(self, one: Checkpoint, target: CheckpointStore, place: str) -> None:
        manifest = one.manifest
        if target.backend.remote:
            target.backend.make(place)
        else:
            _make(place, manifest)
        for name, found in target.contents(place, dict.fromkeys(manifest.files, WHOLE)).items():
            if found != (mark := manifest.files[name]):
                _copy_file(f"{one.path}/{name}", f"{place}/{name}", mark)
                _expect(mark, target.mark(place, name), f"{place}/{name}")
        target.publish(place, manifest, self.keep)
        target.retention.clear()


def _is_copy(copy: Checkpoint, one: Checkpoint) -> bool:
    """Return whether ``copy`` is a copy of ``one``, perhaps from before retention dropped the optimizer of ``one``."""
    there, here = ((each.manifest.step, each.manifest.world_size, each.manifest.storage) for each in (copy, one))
    return there == here and (copy.manifest.files == one.manifest.files or bool(one.manifest.dropped))


def _place(one: Checkpoint, target: CheckpointStore) -> str:
    return target.temporary(one.manifest.step, hashlib.sha256(one.manifest.dumps().encode()).hexdigest()[:12])


def _make(place: str, manifest: Manifest) -> None:
    """Create the directory of a copy, or reuse the directory of an unfinished copy if it has no other files."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(place)
    if os.path.islink(place):
        raise CheckpointError(f"{place} is a link, so nothing was copied. Delete the link.")
    with os.scandir(place) as entries:
        for each in entries:
            if not each.is_file(follow_symlinks=False) or each.name not in (*manifest.files, MANIFEST):
                raise CheckpointError(f"{place} has {each.name}, which is not part of a copy. Move {place} away.")
    with contextlib.suppress(FileNotFoundError):  # an unfinished copy must not have a manifest, which is written last
        os.unlink(f"{place}/{MANIFEST}")


def _copy_file(source: str, target: str, mark: FileDigest) -> None:
    reads, writes = backend_of(source), backend_of(target)

    def copy() -> None:
        to = writes.create(target)
        with reads.open(source) as stream, AlignedFile(to, make_buffers(_BLOCK_BYTES)) as file:
            while block := stream.read(_BLOCK_BYTES):
                file.write(block)
            _expect(mark, file.finish(), source)

    (writes if writes.remote else reads).attempt("copying", target, copy)


def _expect(mark: FileDigest, found: FileDigest, path: str) -> None:
    if found != mark:
        raise CheckpointError(f"{path} does not match its manifest: expected {mark}, got {found}. It was not copied.")
