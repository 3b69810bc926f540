"""Checkpoints without an index, of plain torch or an earlier version: an index made of torch's ``.metadata``.

For ``stagereg convert`` alone. ``.metadata`` is a pickle, read with an unpickler that knows the names of torch's
metadata and nothing else, and makes plain records for them: nothing of the file's choice is imported or called. Every
tensor and value is then a file of ``torch.save``, which is read with ``torch.load(weights_only=True)``. As in torch's
own ``dcp_to_torch_save``, integer keys have become text, and empty containers are gone.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

from stagereg.checkpoint.index import ARCHIVE, DTYPES
from stagereg.checkpoint.manifest import MANIFEST, Checkpoint, FileMark, Manifest
from stagereg.errors import CheckpointError

__all__ = ["METADATA", "index_of_metadata", "plain_checkpoint"]

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint."
_RECORDS = (
    *(f"{_TORCH}metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_TORCH}metadata.{kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")),
    f"{_TORCH}metadata._MEM_FORMAT_ENCODING",
    f"{_TORCH}filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "builtins.getattr",  # with which some Python pickles the member of an enumeration
    *(f"{module}.PosixPath" for module in ("pathlib", "pathlib._local")),
)


def plain_checkpoint(path: str) -> Checkpoint | None:
    """Return the checkpoint of plain torch in a local directory; ``None`` if there is none, or one with a manifest."""
    folder = Path(path).expanduser().absolute()
    if not (folder / METADATA).is_file() or (folder / MANIFEST).exists():
        return None
    files = {file.name: FileMark(os.lstat(file).st_size, 0) for file in folder.iterdir()}
    return Checkpoint(str(folder), Manifest(0, 1, 0, files))


def index_of_metadata(data: bytes | bytearray) -> dict[str, Any]:
    """Return the content of an index (docs/format.md), yet to be checked, for what ``.metadata`` describes.

    Raises:
        CheckpointError: it is damaged, or has something else in it than metadata; nothing of it was run.
    """
    try:
        return _index(vars(_Unpickler(io.BytesIO(data)).load()))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"its {METADATA} is not what torch writes: {str(error)[:200]}.") from error


class _Record:
    """What a pickle has about one object."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if type(state) is dict else {"state": state})


class _Unpickler(pickle.Unpickler):
    """Knows the names of torch's metadata, each as a class of its own that is made for this one pickle."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._known: dict[str, Any] = {name: type(name.rpartition(".")[2], (_Record,), {}) for name in _RECORDS}
        self._known |= {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
        self._known["torch.Size"] = tuple

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[f"{module}.{name}"]
        except KeyError:
            text = f"its {METADATA} names {module[:100]}.{name[:100]}, which is no metadata; nothing was imported."
            raise CheckpointError(text) from None


def _index(metadata: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, int] = {}
    places = {}
    for index, info in metadata["storage_data"].items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError("it is stored through an extension of torch's format, which is not read here.")
        file = files.setdefault(info.relative_path, len(files))
        places[index.fqn, getattr(index, "offset", None)] = [file, info.offset, info.length]
    tensors, objects = {}, {}
    for name, entry in metadata["state_dict_metadata"].items():
        if not hasattr(entry, "chunks"):
            objects[name] = places[name, None]
            continue
        dtype = next(key for key, value in DTYPES.items() if value == entry.properties.state[0])
        chunks = [
            [*places[name, chunk.offsets], [*chunk.offsets], [*chunk.sizes], ARCHIVE]
            for chunk in entry.chunks
            if 0 not in chunk.sizes
        ]
        tensors[name] = [dtype, [*entry.size], chunks]
    paths = metadata.get("planner_data") or {name: (name,) for name in (*tensors, *objects)}
    state = _structure([(path, name) for name, path in paths.items()], 0)["value"]
    return {"format": 1, "files": [*files], "tensors": tensors, "objects": objects, "state": state}


def _structure(paths: list[tuple[Any, str]], depth: int) -> Any:
    """Return the structure of what lies below one place of the state, by the ways to its leaves."""
    if len(paths) == 1 and len(paths[0][0]) == depth:
        return {}
    below: dict[Any, list[tuple[Any, str]]] = {}
    for path, name in paths:
        below.setdefault(path[depth], []).append((path, name))
    parts = {key: _structure(inner, depth + 1) for key, inner in below.items()}
    if all(type(key) is int for key in parts):
        return [parts.get(i) for i in range(max(parts) + 1)] if max(parts) < 2 * len(paths) + 100 else parts
    return {"type": "dict", "value": parts}
