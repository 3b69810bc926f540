"""Storages: some that keep the contract, and some that break one promise each."""

from __future__ import annotations

import dataclasses
import io
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

import stagereg
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.storage.files import standalone
from stagereg.checkpoint.storage.packed import PackedStorage
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError
from stagereg.extensions.interop.readers import FilesReader
from stagereg.testing import StorageContract


class Zip(PackedStorage):
    """A right one."""

    def pack(self, data: memoryview) -> bytes:
        return zlib.compress(data, 1)

    def unpack(self, data: bytes) -> bytes:
        return zlib.decompress(data)


class OfZip(StorageContract):
    kind: Callable[[], Storage] = Zip

    def make(self) -> Storage:
        return type(self).kind()


class OfDcp(StorageContract):
    name = "dcp"

    def make(self) -> Storage:
        built: Storage = stagereg.build("storage", type(self).name)
        return built


class OfSafetensors(OfDcp):
    name = "safetensors"


class OfTorchDcp(OfDcp):
    name = "torch_dcp"


# -- storages that break one promise each


class Items:
    """The planner of a save, with some other values."""

    def __init__(self, planner: Any, change: Callable[[WriteItem, Any], Any]) -> None:
        self._planner, self._change = planner, change

    def resolve_data(self, item: WriteItem) -> Any:
        return self._change(item, self._planner.resolve_data(item))


class Drops(Zip):
    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        return super().write_files(rank, [item for item in items if item.index.fqn != "scalar"], planner)


class LosesDtype(Zip):
    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        def change(item: WriteItem, data: Any) -> Any:
            return data.to(torch.float32) if isinstance(data, torch.Tensor) and not data.is_complex() else data

        return super().write_files(rank, items, Items(planner, change))  # type: ignore[arg-type]


class Truncates(Zip):
    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        results = super().write_files(rank, items, planner)
        file = Path(self.path, results[0].storage_data.relative_path)
        file.write_bytes(file.read_bytes()[:-1])
        return results


class NoDense(Zip):
    """Writes the memory of a slice from its beginning, as if it had no strides."""

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        def change(item: WriteItem, data: Any) -> Any:
            if not isinstance(data, torch.Tensor):
                return data
            return torch.empty(0, dtype=data.dtype).set_(data.untyped_storage())[: data.numel()].view(data.shape)

        return super().write_files(rank, items, Items(planner, change))  # type: ignore[arg-type]


class RefusesWithoutName(Zip):
    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        if any(item.tensor_data and item.tensor_data.properties.dtype is torch.float8_e5m2 for item in items):
            raise CheckpointError("no float8")
        return super().write_files(rank, items, planner)


class OneOfTies(Zip):
    """Writes what shares memory once, as whichever tensor comes first."""

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        seen: dict[int, Any] = {}

        def change(item: WriteItem, data: Any) -> Any:
            if not isinstance(data, torch.Tensor) or not data.numel():
                return data
            first = seen.setdefault(data.untyped_storage().data_ptr(), standalone(data))
            return first.reshape(-1)[: data.numel()].view(data.shape) if first.numel() >= data.numel() else data

        return super().write_files(rank, items, Items(planner, change))  # type: ignore[arg-type]


class OtherObjects(Zip):
    def unpack(self, data: bytes) -> bytes:
        found = torch.load(io.BytesIO(super().unpack(data)), weights_only=True)
        if not isinstance(found, tuple):
            return super().unpack(data)
        torch.save((*found, None), content := io.BytesIO())
        return content.getvalue()


class RightOnce(Zip):
    """Writes zeros from its second checkpoint on."""

    saves, least = 0, 0

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self.saves += 1

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        def change(item: WriteItem, data: Any) -> Any:
            is_second = self.saves > 2 and isinstance(data, torch.Tensor) and "." not in item.index.fqn
            return data * 0 if is_second and data.numel() > self.least else data

        return super().write_files(rank, items, Items(planner, change))  # type: ignore[arg-type]


class RightOnceIfLarge(RightOnce):
    least = 2**16


class NeedsArgument(Zip):
    def __init__(self, key: int) -> None:
        self.key = key
        super().__init__()


class Keyed(Zip):
    """Reads only with the option that it wrote with."""

    def __init__(self, key: int = 0) -> None:
        self.key = key
        super().__init__()

    def pack(self, data: memoryview) -> bytes:
        return bytes(byte ^ self.key for byte in super().pack(data)[:4]) + super().pack(data)[4:]

    def unpack(self, data: bytes) -> bytes:
        return super().unpack(bytes(byte ^ self.key for byte in data[:4]) + data[4:])


MEMORY: list[bytes] = []


class InMemory(PackedStorage):
    def pack(self, data: memoryview) -> bytes:
        MEMORY.append(bytes(data))
        return b"%08d" % (len(MEMORY) - 1)

    def unpack(self, data: bytes) -> bytes:
        return MEMORY[int(data)]


class Elsewhere(Zip):
    """Keeps the data of all checkpoints next to their directories."""

    def pack(self, data: memoryview) -> bytes:
        file = Path(self.path).parent / f"{zlib.crc32(data):08x}"
        file.write_bytes(super().pack(data))
        return str(file).encode()

    def unpack(self, data: bytes) -> bytes:
        return super().unpack(Path(data.decode()).read_bytes())


class Locked(Zip):
    def __init__(self, path: Any = None) -> None:
        super().__init__(path)
        self.lock = threading.Lock()


class ForgetsMarks(Zip):
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_marks": {}}


class TensorsOnly(Zip):
    """Leaves out plain values, which stagereg has in its index as well."""

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        return super().write_files(rank, [item for item in items if item.tensor_data is not None], planner)


class OneFile(Zip):
    """All ranks write the file of rank 0."""

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        return super().write_files(0, items, planner)


class Reads(FilesReader):
    """A reader that takes each item as ``changed`` has it."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        return super().read_data(dataclasses.replace(plan, items=[*map(self.changed, plan.items)]), planner)

    def changed(self, item: Any) -> Any:
        return item


class IgnoresOffset(Zip):
    """Returns the first elements of a stored tensor, whichever a rank needs."""

    def reader(self, path: Any) -> Any:
        class Reader(Reads):
            def changed(self, item: Any) -> Any:
                return dataclasses.replace(item, storage_offsets=torch.Size([0] * len(item.storage_offsets)))

        return Reader(path, self.unpack)


class WrongMarks(Zip):
    @property
    def marks(self) -> Mapping[str, FileDigest]:
        return {name: dataclasses.replace(mark, crc32=mark.crc32 ^ 1) for name, mark in super().marks.items()}


class SwallowsErrors(Zip):
    """Goes on where a write fails, with what there is of the file."""

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        name, results = f"__{rank}_0.part", []
        with Path(self.path, name).open("wb", buffering=0) as file:
            for item in items:
                content = planner.resolve_data(item)
                if isinstance(content, torch.Tensor):
                    torch.save(standalone(content), content := io.BytesIO())
                packed, begin = self.pack(content.getbuffer()), file.tell()
                try:
                    file.write(packed)
                except OSError:
                    continue
                finally:
                    results.append(WriteResult(item.index, len(packed), _StorageInfo(name, begin, len(packed))))
        return results


def of(kind: Any) -> type[StorageContract]:
    name = f"Of{kind.__name__}"
    made = (lambda: kind(7)) if kind in (Keyed, NeedsArgument) else kind
    members = {"kind": staticmethod(made), "timeout_s": 5.0, "__module__": __name__}
    globals()[name] = contract = type(name, (OfZip,), members)
    return contract


RIGHT = [OfZip, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (OfDcp, OfSafetensors, OfTorchDcp))]
WRONG = [
    (promise, of(kind))
    for promise, kind in [
        ("test_every_value", Drops),
        ("test_every_value", LosesDtype),
        ("test_every_value", Truncates),
        ("test_every_value", NoDense),
        ("test_rare_dtypes", RefusesWithoutName),
        ("test_ties", OneOfTies),
        ("test_objects", OtherObjects),
        ("test_save_after_save", RightOnce),
        ("test_save_after_save", RightOnceIfLarge),
        ("test_no_arguments", NeedsArgument),
        ("test_no_arguments", Keyed),
        ("test_in_another_process", InMemory),
        ("test_in_another_process", Elsewhere),
        ("test_pickled", Locked),
        ("test_pickled", ForgetsMarks),
        ("test_torch", TensorsOnly),
        ("test_two_ranks", OneFile),
        ("test_another_world_size", IgnoresOffset),
        ("test_corrupt_files", WrongMarks),
        ("test_full_disk", SwallowsErrors),
    ]
]
