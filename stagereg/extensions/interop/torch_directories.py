"""Verify directories that ``torch.distributed.checkpoint`` wrote, with :class:`stagereg.DcpWriter` or torch's writer.

Such a directory has no manifest. Runs do not count, replace or delete it. ``DcpWriter`` records the size and the
checksum of each file. torch's own writer records no checksums; its ``.metadata`` gives a minimum size of each file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import stagereg.checkpoint.format.manifest as manifests
from stagereg.checkpoint.format.damage import VerificationResult, damage_of, differences
from stagereg.checkpoint.format.manifest import CHECKSUMS, LATEST_TIME, METADATA, FileDigest, Manifest, step_within
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.foreign import TORCH
from stagereg.errors import MALFORMED, CheckpointError

DCP_WRITER = "DcpWriter"
_MOST_BYTES = 1 << 30  # largest file that is read
_MODULE = b"torch.distributed.checkpoint.metadata"  # module name that each pickle of torch's metadata contains


def look(backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
    """Verify the directory ``path``. ``there`` maps the names in the directory to their sizes or errors.

    If ``.metadata`` or the checksums cannot be read, the manifest in the result has no files.
    """
    step = step_within(path.rpartition("/")[2]) or 0
    name = CHECKSUMS if CHECKSUMS in there else METADATA
    writer, storage = (DCP_WRITER, "dcp") if name == CHECKSUMS else (TORCH, "torch_dcp")
    manifest, wrong = Manifest(step, 0, 0, {}, storage, _modified(f"{path}/{name}")), {}
    try:
        if isinstance(size := there[name], str):
            raise ValueError(size)
        if size > _MOST_BYTES:
            raise ValueError(f"the file is too large: {size:,} bytes")
        content = backend.read(f"{path}/{name}")
        if writer == DCP_WRITER:
            manifest = Manifest.loads(content)
            wrong = differences(manifest, there)
        else:
            manifest, wrong = _of_torch(manifest, content, path, there)
    except OSError as error:
        wrong = {name: damage_of(error)}
    except MALFORMED as error:
        wrong = {name: f"corrupt ({error})"}
    return VerificationResult(path, manifest, wrong, writer)


def _of_torch(
    manifest: Manifest, content: bytes, path: str, there: Mapping[str, int | str]
) -> tuple[Manifest, dict[str, str]]:
    """Return the manifest with the files that ``.metadata`` names, and the error of each missing or truncated file."""
    least = {METADATA: len(content), **_file_sizes(content)}
    found = {name: _followed(f"{path}/{name}", there[name]) for name in least if name in there}
    for name, size in least.items():
        seen = found.get(name)
        manifest.files[name] = FileDigest(max(size, seen) if isinstance(seen, int) else size, 0)
    return manifest, differences(manifest, found)


def _file_sizes(content: bytes) -> dict[str, int]:
    """Return the minimum size of each file in bytes, by name. Raises ``ValueError`` if ``.metadata`` is invalid."""
    if _MODULE not in content:  # checked before torch is imported, which takes 250 MiB of memory
        raise ValueError("not torch metadata")
    from stagereg.extensions.interop.torch_metadata import loads

    sizes: dict[str, int] = {}
    try:
        for info in loads(content).storage_data.values():
            name, end = info.relative_path, info.offset + info.length
            if not manifests.is_name(name) or "/" in name or name in (".", ".."):
                raise ValueError(f"the metadata names {name!r:.100}, which is not a file in the directory")
            sizes[name] = max(end, sizes.get(name, 0))
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return sizes


def _followed(path: str, there: int | str) -> int | str:
    """Return the listed size ``there``, or the size of a symbolic link's target, because torch follows links."""
    try:
        return os.stat(path).st_size if os.path.islink(path) else there
    except OSError as error:
        return damage_of(error)


def _modified(path: str) -> int:
    """Return the modification time of a local file in whole Unix seconds; 0 if the time is unknown."""
    try:
        return min(max(0, int(os.stat(path).st_mtime)), LATEST_TIME)
    except OSError:
        return 0
