"""``safetensors``: store tensors in ``.safetensors`` files, which other tools read, and other values in torch's format.

Each rank writes its tensors to one file, with the file name of torch's ``HuggingFaceStorageWriter``. The file has the
rank's shard of each ``DTensor``, and the offsets of the shard in its metadata. Other values are in ``__0_0.distcp``,
and ``.metadata`` has the locations of all values, as in torch's own format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.base.option_text import choice
from stagereg.base.pages import view_of
from stagereg.checkpoint.format.index import TensorResult
from stagereg.checkpoint.format.wrappers import name_of, wraps
from stagereg.checkpoint.storage.files import FileStorage, StrPath, write_archive
from stagereg.errors import CheckpointError, ConfigError
from stagereg.registry import register

METADATA = "__metadata__"  # a reserved name in the header of a file, which no tensor can have

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}

_ALIGNMENT = 8
_SUFFIX = ".safetensors"
_BUFFER_BYTES = 1 << 22  # all tensors are buffered, since the format does not allow padding to align them


def head(tensors: Mapping[str, tuple[torch.dtype, torch.Size]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file. After it, write the bytes of the tensors, row-major, in the order of ``tensors``.

    All dtypes must be in :data:`DTYPES`. Tensors with larger elements must come first, so that each tensor is aligned.
    """
    table: dict[str, object] = {METADATA: dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + shape.numel() * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@register("storage", "safetensors")
class SafetensorsStorage(FileStorage):
    """Writes files for ``safetensors.torch.load_file``. Requires the package ``safetensors``.

    ``torch.distributed.checkpoint.load(..., storage_reader=HuggingFaceStorageReader(path))`` reads only the tensors;
    :meth:`reader` reads all values. Tied tensors are written once for each name. Sparse and quantized tensors, and
    tensors of a dtype that the format does not support, are rejected.

    Args:
        path: the directory; torch and the checkpointer set a new directory for each checkpoint.

    Raises:
        ConfigError: the package is not installed.
    """

    remote = False  # the package reads local files only

    def __init__(self, path: StrPath | None = None) -> None:
        try:
            import safetensors  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"{choice('storage', 'safetensors')} needs a package that is not installed: "
                "pip install './stagereg[safetensors]'"
            ) from error
        super().__init__(path, direct=True, buffer_bytes=_BUFFER_BYTES)

    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write the items of a rank. Raises ``CheckpointError`` for a tensor that the format does not support."""
        by_name = {item.index.fqn: item for item in items}
        kinds = {name: item.tensor_data for name, item in by_name.items() if item.tensor_data is not None}
        if len(by_name) < len(items):
            raise CheckpointError(
                f"safetensors cannot store two shards of one tensor on the same rank. Use {choice('storage', 'dcp')}."
            )
        for name, kind in kinds.items():
            if kind.properties.dtype not in DTYPES:
                why = f"the format does not support {kind.properties.dtype}. Use {choice('storage', 'dcp')}."
                raise CheckpointError(f"safetensors cannot store {name!r}: {why}")
        results: list[WriteResult] = []
        others = [item for item in items if item.tensor_data is None]
        if others:
            name = f"__{rank}_0{DEFAULT_SUFFIX}"
            with self.create(name) as file:
                results += [write_archive(file, name, item, planner.resolve_data(item)) for item in others]
        if not kinds:
            return results
        order = sorted(kinds, key=lambda name: (-kinds[name].properties.dtype.itemsize, name))
        tensors = {name: (kinds[name].properties.dtype, kinds[name].chunk.sizes) for name in order}
        # The metadata format of torch's HuggingFaceStorageWriter.
        offsets = {name: {"saved_offsets": list(kind.chunk.offsets)} for name, kind in kinds.items()}
        about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        file_name = f"shard-{rank + 1:05}-model-00001-of-00001{_SUFFIX}"
        with self.create(file_name) as file:
            file.write(head(tensors, about))
            for name in order:
                x = _dense(name, planner.resolve_data(by_name[name]))
                info = _StorageInfo(file_name, file.tell(), x.nbytes)
                if x.nbytes:
                    file.write_memory(view_of(x))
                results.append(TensorResult(by_name[name].index, x.nbytes, info, info.offset, x.stride()))
        return results

    def reader(self, path: StrPath) -> StorageReader:
        return SafetensorsReader(path)


class SafetensorsReader(FileSystemReader):
    """Reads the files that :class:`SafetensorsStorage` wrote to the directory ``path``."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan. Reads tensors with torch's ``HuggingFaceStorageReader``."""
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        others = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        reader = HuggingFaceStorageReader(str(self.path))
        reader.storage_data = {
            index: replace(info, relative_path=str(Path(self.path) / info.relative_path))
            for index, info in self.storage_data.items()
        }
        reader.read_data(replace(plan, items=tensors), planner).wait()
        return super().read_data(replace(plan, items=others), planner)


def _dense(name: str, x: object) -> torch.Tensor:
    """Return a tensor in host memory, dense and row-major, as the format requires. Raises ``CheckpointError``."""
    assert isinstance(x, torch.Tensor)
    if wraps(x):
        why = f"it is a {name_of(x)}, which wraps other tensors. Use {choice('storage', 'dcp')}."
        raise CheckpointError(f"safetensors cannot store {name!r}: {why}")
    if x.layout is not torch.strided:
        raise CheckpointError(f"safetensors cannot store {name!r}: it is {x.layout}, not dense.")
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()
