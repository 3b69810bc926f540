"""``safetensors``: tensors as ``.safetensors`` files, which other tools read; everything else in a file of torch's.

Torch's ``HuggingFaceStorageWriter`` writes one file of tensors a rank, named in that format after the rank as
``shard-00001-model-00001-of-00001.safetensors``. A whole tensor is in one of them; of a ``DTensor`` each has a shard,
with its offsets in the file's metadata. Numbers, text and what else is no tensor cannot be in such a file: it goes into
``__0_0.distcp``, and ``.metadata`` has where everything is, as in torch's own format.

A rank's tensors are gathered in host memory once more, as torch's writer does it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.checkpoint.storage.files import FileStorage, StrPath
from stagereg.checkpoint.storage.reader import CheckpointReader
from stagereg.errors import CheckpointError, ConfigError
from stagereg.registry import register

__all__ = ["SafetensorsReader", "SafetensorsStorage"]

_SUFFIX = ".safetensors"


@register("storage", "safetensors")
class SafetensorsStorage(FileStorage):
    """Writes files for ``safetensors.torch.load_file``; needs the package ``safetensors``.

    ``torch.distributed.checkpoint.load(..., storage_reader=HuggingFaceStorageReader(path))`` reads the tensors,
    :meth:`reader` all of it. Tied tensors are written once a name. A tensor that the format cannot hold (sparse,
    quantized, or of a dtype it does not name) is an error that names it.

    Args:
        path: the directory; torch and the checkpointer name another for each checkpoint.

    Raises:
        ConfigError: the package is not installed.
    """

    remote = False  # the package reads local files only

    def __init__(self, path: StrPath | None = None) -> None:
        _expect_package()
        super().__init__(path)
        self._tensors = HuggingFaceStorageWriter("", save_distributed=True)
        self._tensors.fs = self.fs
        self._tensors.sync_files = False  # the streams do it

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory. Raises: ``CheckpointError``, with the name of a tensor that cannot be written."""
        for item in plan.items:
            _check_dtype(item)
        if len({item.index.fqn for item in plan.items if _is_tensor(item)}) < sum(map(_is_tensor, plan.items)):
            raise CheckpointError("safetensors: this rank has two parts of one tensor; use storage=dcp or direct.")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's files. Called on the coordinator."""
        ours, theirs = super().prepare_global_plan(plans), self._tensors.prepare_global_plan(plans)
        return [
            replace(plan, storage_data=_Names(our.storage_data, their.storage_data))
            for plan, our, their in zip(plans, ours, theirs, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Raises: ``OSError``; ``CheckpointError``, with the name of a sparse tensor."""
        names: _Names = plan.storage_data
        others = [item for item in plan.items if not _is_tensor(item)]
        tensors = [item for item in plan.items if _is_tensor(item)]
        results: list[WriteResult] = []
        self.files.marks.clear()
        if others:
            results += super().write_data(replace(plan, items=others, storage_data=names.others), planner).wait()
        self._tensors.path = self.path
        flat: Any = _Flat(planner)
        with self.failing_as_its_streams():
            results += self._tensors.write_data(replace(plan, items=tensors, storage_data=names.tensors), flat).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def reader(self, path: StrPath) -> StorageReader:
        """See :class:`.Storage`."""
        return SafetensorsReader(path)


class SafetensorsReader(CheckpointReader):
    """Reads what :class:`SafetensorsStorage` wrote in the directory ``path``."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan, tensors through torch's ``HuggingFaceStorageReader``."""
        tensors = [item for item in plan.items if self._file(item).suffix == _SUFFIX]
        others = [item for item in plan.items if self._file(item).suffix != _SUFFIX]
        for name in {self.storage_data[item.storage_index].relative_path for item in tensors}:
            self.expect_regular(name)
        reader = HuggingFaceStorageReader(str(self.path))
        reader.storage_data = {
            item.storage_index: replace(self.storage_data[item.storage_index], relative_path=str(self._file(item)))
            for item in tensors
        }
        reader.read_data(replace(plan, items=tensors), planner).wait()
        return super().read_data(replace(plan, items=others), planner)

    def _file(self, item: ReadItem) -> Path:
        return Path(self.path) / self.storage_data[item.storage_index].relative_path


@dataclass(frozen=True)
class _Names:
    """What the two writers have to know to name a rank's files; torch carries it from the coordinator to the ranks."""

    others: Any
    tensors: Any


class _Flat:
    """A planner that gives each tensor in memory of its own, contiguous, as the format has it."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._seen: set[int] = set()

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        x = self._planner.resolve_data(item)
        assert isinstance(x, torch.Tensor)
        if x.layout is not torch.strided:
            raise CheckpointError(f"safetensors cannot hold {item.index.fqn!r}: it is {x.layout}, not dense.")
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        begin = x.untyped_storage().data_ptr()
        if begin in self._seen:
            return x.clone()
        self._seen.add(begin)
        return x


def _is_tensor(item: WriteItem) -> bool:
    return item.type is not WriteItemType.BYTE_IO


def _check_dtype(item: WriteItem) -> None:
    if item.tensor_data is None:
        return
    dtype = item.tensor_data.properties.dtype
    if not _has(dtype):
        raise CheckpointError(
            f"safetensors cannot hold {item.index.fqn!r}: the format has no {dtype}; use storage=dcp or direct."
        )


@functools.cache
def _has(dtype: torch.dtype) -> bool:
    """Whether the installed version of the package can write and read tensors of ``dtype``."""
    from safetensors.torch import load, save

    try:
        return load(save({"x": torch.empty(1, dtype=dtype)}))["x"].dtype == dtype
    except (KeyError, RuntimeError, ValueError):
        return False


def _expect_package() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "storage=safetensors needs a package that is not installed: pip install 'hydra-stagereg[safetensors]'"
        ) from error
