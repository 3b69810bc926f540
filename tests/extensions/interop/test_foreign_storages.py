"""What a storage of another package writes is read by its own reader; a save that cannot be read back is refused."""

from __future__ import annotations

import dataclasses
import io
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

import stagereg.checkpoint.load.read_back as reading_back
import stagereg.checkpoint.storage.digests as digests
import stagereg.checkpoint.storage.reading as reading
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.files import FileStorage
from stagereg.checkpoint.storage.packed import PackedStorage
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks


class OwnReader(FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            file = Path(self.path) / info.relative_path
            data = io.BytesIO(zlib.decompress(file.read_bytes()[info.offset : info.offset + info.length]))
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, data)
                continue
            found = torch.load(data, weights_only=True)
            planner.resolve_tensor(item).copy_(narrow_tensor_by_index(found, item.storage_offsets, item.lengths))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Own(FileStorage):
    """Derives from the public base, with files and a reader of its own."""

    def write_files(self, rank: int, items: Any, planner: Any) -> list[WriteResult]:
        results = []
        with self.create(f"__{rank}_0.own") as file:
            for item in items:
                content = planner.resolve_data(item)
                if isinstance(content, torch.Tensor):
                    torch.save(content.clone(), content := io.BytesIO())
                begin = file.tell()
                file.write(zlib.compress(content.getvalue()))
                info = _StorageInfo(f"__{rank}_0.own", begin, file.tell() - begin)
                results.append(WriteResult(item.index, info.length, info))
        return results

    def reader(self, path: Any) -> Any:
        return OwnReader(path)


class Packed(PackedStorage):
    def pack(self, data: memoryview) -> bytes:
        return zlib.compress(data, 1)

    def unpack(self, data: bytes) -> bytes:
        return zlib.decompress(data)


def state(factor: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": factor * torch.arange(12.0).reshape(3, 4)}, "pair": (factor * torch.ones(2), 1), "n": 3}


@pytest.mark.parametrize("kind", [Own, Packed])
def test_what_a_storage_with_its_own_reader_saves_is_restored(tmp_path: Path, kind: type[FileStorage]) -> None:
    with Checkpointer(str(tmp_path), storage=kind()) as saving:
        saving.save(1, state())
    found = state(0.0)
    with Checkpointer(str(tmp_path), storage=kind()) as restoring:
        assert restoring.restore(found) == 1
    assert torch.equal(found["model"]["w"], state()["model"]["w"])
    assert torch.equal(found["pair"][0], torch.ones(2))


# -- what is refused, each with the entry that the message names


class NoReader(Own):
    """Its reader is the one of the base, which reads what torch writes."""

    reader = FileStorage.reader


class Hidden(DcpStorage):
    """Says where its entries are, although only its reader can read them."""

    def write_files(self, rank: int, items: Any, planner: Any) -> list[WriteResult]:
        results = super().write_files(rank, items, planner)
        file = Path(self.path, f"__{rank}_0.distcp")
        file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
        return results


class Wraps(Hidden):
    """Changes the files of the storage whose name the manifest gets, and which reads them."""

    wraps = DcpStorage()


class Drops(Packed):
    def write_files(self, rank: int, items: Any, planner: Any) -> list[WriteResult]:
        return super().write_files(rank, [item for item in items if item.index.fqn != "model.w"], planner)


class LeavesOut(Packed):
    """Its reader skips an entry without a word."""

    def reader(self, path: Any) -> Any:
        found: Any = super().reader(path)
        read = found.read_data
        found.read_data = lambda plan, planner: read(dataclasses.replace(plan, items=plan.items[1:]), planner)
        return found


class Unfilled(Own):
    """Its reader asks for the memory of a tensor, and does not fill it."""

    def reader(self, path: Any) -> Any:
        class Reader(OwnReader):
            def read_data(self, plan: Any, planner: Any) -> Any:
                for item in plan.items:
                    if item.type is LoadItemType.TENSOR:
                        planner.resolve_tensor(item)
                items = [item for item in plan.items if item.type is not LoadItemType.TENSOR]
                return super().read_data(dataclasses.replace(plan, items=items), planner)

        return Reader(path)


class Rounds(Packed):
    def unpack(self, data: bytes) -> bytes:
        found = torch.load(io.BytesIO(super().unpack(data)), weights_only=True)
        torch.save(found + 2 if isinstance(found, torch.Tensor) else found, content := io.BytesIO())
        return content.getvalue()


class OtherObject(Packed):
    def unpack(self, data: bytes) -> bytes:
        found = torch.load(io.BytesIO(super().unpack(data)), weights_only=True)
        torch.save((found[0], 2) if isinstance(found, tuple) else found, content := io.BytesIO())
        return content.getvalue()


class OtherDtype(Own):
    def reader(self, path: Any) -> Any:
        class Reader(OwnReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                found = super().read_metadata()
                entry: Any = found.state_dict_metadata["model.w"]
                entry.properties.dtype = torch.float64
                return found

        return Reader(path)


WRONG = {
    NoReader: "'model.w' cannot be read",
    Hidden: "'model.w' has other bytes",
    Wraps: "'model.w' has other bytes",
    Drops: "write_data of the storage returned no result for 'model.w'",
    LeavesOut: "the reader of its storage skipped ",
    Unfilled: "'model.w' has other bytes",
    Rounds: "'model.w' has other bytes",
    OtherObject: "'pair' has other bytes",
    OtherDtype: r"'model.w' should be torch.float32 .*, but is torch.float64 \[3, 4\] in the metadata",
}


@pytest.mark.parametrize(("kind", "seen"), WRONG.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_save_that_its_storage_does_not_read_back_is_refused(
    tmp_path: Path, kind: type[FileStorage], seen: str
) -> None:
    with Checkpointer(str(tmp_path)) as saving:
        saving.save(1, state())
    with pytest.raises(CheckpointError, match=seen) as error, Checkpointer(str(tmp_path), storage=kind()) as saving:
        saving.save(2, state())
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-00000001"]
    if kind is not Drops:  # which the results show before
        assert kind.__name__ in str(error.value)
        assert "StorageContract" in str(error.value)
        assert 'storage="dcp"' in str(error.value)


def test_memory_that_happens_to_hold_the_bytes_does_not_count_as_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reading._memory_for
    monkeypatch.setattr(reading, "_memory_for", lambda leaf: state()["model"]["w"] if "w" in leaf.name else real(leaf))
    with pytest.raises(CheckpointError, match=r"'model.w' has other bytes"):  # noqa: SIM117
        with Checkpointer(str(tmp_path), storage=Unfilled()) as saving:
            saving.save(1, {"model": state()["model"]})


def test_it_is_read_back_once_and_the_projects_own_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = reading_back._expect_content
    monkeypatch.setattr(reading_back, "_expect_content", lambda *args: (read.append("once"), real(*args)))
    for name, kind in (("packed", Packed), ("dcp", DcpStorage)):
        with Checkpointer(str(tmp_path / name), storage=kind(), keep=9) as saving:
            for step in (1, 2, 3):
                saving.save(step, state())
        assert read == ["once"]


class Fails(Packed):
    """Its first save fails before anything is read back."""

    saves = 0

    def write_files(self, rank: int, items: Any, planner: Any) -> list[WriteResult]:
        type(self).saves += 1
        if self.saves == 1:
            raise OSError(28, "No space left on device")
        return super().write_files(rank, items, planner)

    def unpack(self, data: bytes) -> bytes:
        raise ValueError("it cannot be unpacked")


def test_a_failed_save_was_not_read_back_so_the_next_one_is(tmp_path: Path) -> None:
    saving = Checkpointer(str(tmp_path), storage=Fails())
    for step, seen in ((1, "No space left"), (2, "it cannot be unpacked")):
        saving.save(step, state())
        with pytest.raises(CheckpointError, match=seen):
            saving.wait()
    saving.close()
    assert not [*tmp_path.glob("step-*")]


def test_what_is_read_back_is_bounded_and_has_the_largest_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST_BYTES", 100)
    sizes = {"huge": 1000, "half": 50, "more": 51, "a": 1, "b": 2, "c": 40, "d": 45, "none": 0}
    assert digests.bounded(sizes) == ["half", "none", "a", "b", "c"]
    assert digests.bounded({"huge": 1000}) == []


class ForgetsOffset(Own):
    """Writes what each rank has of a tensor as if it were the beginning of it."""

    def reader(self, path: Any) -> Any:
        class Reader(OwnReader):
            def read_data(self, plan: Any, planner: Any) -> Any:
                first = min(self.storage_data, key=lambda index: (index.fqn != "w", index.offset or ()))
                items = [
                    dataclasses.replace(item, storage_index=first) if item.storage_index.fqn == "w" else item
                    for item in plan.items
                ]
                for item, other in zip(plan.items, items, strict=True):
                    if item is not other:
                        planner.resolve_tensor(item).copy_(torch.load(io.BytesIO(self.first(first)), weights_only=True))
                kept = [item for item in plan.items if item.storage_index.fqn != "w"]
                return super().read_data(dataclasses.replace(plan, items=kept), planner)

            def first(self, index: Any) -> bytes:
                info = self.storage_data[index]
                data = (Path(self.path) / info.relative_path).read_bytes()
                return zlib.decompress(data[info.offset : info.offset + info.length])

        return Reader(path)


def save_shards(rank: int, world_size: int, root: str) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world_size,))
    seen = {}
    for kind in (Packed, ForgetsOffset):
        shards = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        try:
            with Checkpointer(f"{root}/{kind.__name__}", storage=kind()) as saving:
                saving.save(1, {"w": shards, f"of.rank{rank}": torch.full((3,), float(rank))})
        except CheckpointError as error:
            seen[kind.__name__] = str(error)
    return seen


def test_every_rank_gets_the_refusal_of_a_save_of_two(tmp_path: Path) -> None:
    refusals = run_ranks(save_shards, 2, args=(str(tmp_path),))
    for seen in refusals:
        assert [*seen] == ["ForgetsOffset"]
        assert "'w' has other bytes from [2, 0] on" in seen["ForgetsOffset"]
    assert [each.parent.name for each in tmp_path.glob("*/step-*")] == ["Packed"]
