"""``open_checkpoint``: tensors by name with the bits that were saved, no more bytes read than are asked for."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import FileDigest, Manifest
from stagereg.checkpoint.options import Restore
from stagereg.errors import CheckpointError
from stagereg.registry import build
from stagereg.stagers.blocking import BlockingAsyncStager

from ...support.faulty_storage import flip

MIB = 1 << 20
DATA = "__0_0.distcp"


def save(root: Path | str, *states: dict[str, Any], storage: str = "dcp") -> str:
    made = build("storage", storage)
    with Checkpointer(str(root), keep=9, stager=BlockingAsyncStager(), storage=made) as checkpointer:
        for step, state in enumerate(states, start=1):
            checkpointer.save(step, state)
    return str(root)


def bytes_read() -> int:
    """What this process has asked the system to read, so far."""
    return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])


def is_mapped(x: torch.Tensor, root: str) -> bool:
    """Whether the memory of a tensor is that of a file below ``root``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= x.data_ptr() < end:
            return root in line
    return False


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)


def kinds() -> dict[str, torch.Tensor]:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    plain = {str(dtype): torch.arange(5).to(dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)}
    return {**plain, "transposed": base.t(), "tied": base, "tied too": base, "one": base[1, 2], "none": base[:, :0]}


@pytest.mark.parametrize("storage", ["dcp", "torch_dcp", "safetensors"])
def test_tensors_of_every_kind_have_their_bits(tmp_path: Path, storage: str) -> None:
    if storage == "safetensors":
        pytest.importorskip("safetensors")
    tensors = kinds() | {"large": torch.arange(MIB).reshape(512, -1).t()}
    root = save(tmp_path, {"x": tensors, "epoch": 7}, storage=storage)
    with stagereg.open_checkpoint(root) as checkpoint:
        assert sorted(checkpoint) == sorted(f"x.{name}" for name in tensors)
        assert len(checkpoint) == len(tensors)
        assert all(alike(checkpoint[f"x.{name}"], x) for name, x in tensors.items())
        assert is_mapped(checkpoint["x.large"], root) == (storage != "torch_dcp")


def test_a_mapped_tensor_is_not_read_and_outlives_the_checkpoint(tmp_path: Path) -> None:
    root = save(tmp_path, {"x": torch.ones(16 * MIB), "y": torch.zeros(9)})
    before = bytes_read()
    with stagereg.open_checkpoint(root) as checkpoint:
        x = checkpoint["x"]
    assert bytes_read() - before < MIB
    shutil.rmtree(root)
    assert x.sum() == x.numel()


def test_writing_to_a_tensor_never_changes_the_checkpoint(tmp_path: Path) -> None:
    state = {"x": torch.ones(MIB), "y": torch.arange(6).reshape(2, 3).t()}
    root = save(tmp_path, state)
    with stagereg.open_checkpoint(root) as checkpoint:
        for x in checkpoint.values():
            x.zero_()
        assert checkpoint["x"].sum() == 0  # in the memory of this process, which is the same again
    with stagereg.open_checkpoint(root, verify=True) as checkpoint:
        assert all(alike(checkpoint[name], x) for name, x in state.items())


def test_plain_values_and_state_dicts_are_entries(tmp_path: Path) -> None:
    allowed = (torch.ones(2), "text")
    state = {"epoch": 7, "list": [torch.ones(2), {3: None}], "pair": allowed, "model": torch.nn.BatchNorm1d(2)}
    root = save(tmp_path, {}, state)
    with stagereg.open_checkpoint(root) as checkpoint:
        assert (checkpoint.step, checkpoint.verified) == (2, False)
        assert checkpoint.manifest is not None
        assert checkpoint.manifest.world_size == 1
        assert checkpoint.entries == tuple(sorted(state))
        assert repr(checkpoint) == f"<checkpoint {root}/step-00000002, step 2: epoch, list, model, pair>"
        for _ in range(2):  # what is done to one is not in the next
            assert checkpoint.entry("epoch") == 7
            assert (checkpoint.entry("list")[1], checkpoint.entry("pair")[1]) == ({3: None}, "text")
            found = checkpoint.entry("model")
            assert type(found) is OrderedDict
            assert found._metadata == state["model"].state_dict()._metadata
            found.clear()
        with pytest.raises(CheckpointError, match=r"no entry 'modle'.*It has epoch, list, model.*Did you mean 'model'"):
            checkpoint.entry("modle")


def test_an_unknown_name_is_a_key_error_that_helps(tmp_path: Path) -> None:
    with stagereg.open_checkpoint(save(tmp_path, {"x": {"weight": torch.ones(2)}, "n": 1})) as checkpoint:
        with pytest.raises(KeyError, match=r"Did you mean 'x.weight'"):
            checkpoint["x.wieght"]
        assert "n" not in checkpoint
        assert checkpoint.get("x") is None
    with pytest.raises(CheckpointError, match=r"was closed\. Open the checkpoint again"):
        checkpoint["x.weight"]


def test_of_a_url_the_blocks_that_are_needed_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    root = save(f"memory://{uuid.uuid4().hex}/runs", {"large": torch.ones(20 * MIB), "small": torch.ones(9)})
    fetched = []
    cat_file = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, *arguments: Any, **more: Any) -> bytes:
        fetched.append(cat_file(self, *arguments, **more))
        return bytes(fetched[-1])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    with stagereg.open_checkpoint(root) as checkpoint:
        opening = sum(map(len, fetched))
        assert checkpoint["small"].sum() == 9
    assert opening < MIB
    assert opening < sum(map(len, fetched)) <= opening + 2 * 16 * MIB  # of 80


def test_bytes_at_any_offset_are_read(tmp_path: Path) -> None:
    expected = torch.arange(6, dtype=torch.int32)
    content = b"x" + expected.numpy().tobytes()
    index = {"format": 1, "files": ["data"], "tensors": {"x": ["int32", [6], [[0, 1, 24]]]}, "objects": {}}
    files = {"data": content, INDEX: json.dumps(index | {"state": {"x": {}}}).encode()}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    manifest = Manifest(3, 1, 1, {name: FileDigest(len(text), crc32(text)) for name, text in files.items()})
    (tmp_path / "manifest.json").write_text(manifest.dumps())
    with stagereg.open_checkpoint(tmp_path, verify=True) as checkpoint:
        x = checkpoint["x"]
    assert alike(x, expected)
    assert x.data_ptr() % x.itemsize == 0


# -- what is not opened


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / DATA).write_bytes(b"short"), "__0_0.distcp: truncated: 5 of"),
        (lambda at: (at / "manifest.json").unlink(), "manifest.json: missing"),
        (lambda at: flip(at / INDEX), "index.json of .* is corrupt: CRC-32 mismatch"),
    ],
)
def test_what_is_damaged_or_incomplete_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    at = Path(save(tmp_path, {"x": torch.ones(99)})) / "step-00000001"
    damage(at)
    for path in (at, tmp_path):
        with pytest.raises(CheckpointError, match=message):
            stagereg.open_checkpoint(path)


def test_a_flipped_bit_is_found_where_content_is_verified(tmp_path: Path) -> None:
    at = Path(save(tmp_path, {"x": torch.ones(99)})) / "step-00000001"
    flip(at / DATA)
    assert not stagereg.open_checkpoint(at).verified
    with pytest.raises(CheckpointError, match="CRC-32 mismatch: expected"):
        stagereg.open_checkpoint(at, verify=True)


def test_of_a_directory_the_newest_complete_one_is_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = Path(save(tmp_path, *({"n": n} for n in range(3))))
    assert stagereg.open_checkpoint(root).step == 3
    assert stagereg.open_checkpoint(root / "step-00000001").step == 1
    assert stagereg.open_checkpoint(root / "latest").step == 3
    assert not caplog.records
    os.truncate(root / "step-00000003" / INDEX, 3)
    assert stagereg.open_checkpoint(root).entry("n") == 1
    assert "step-00000003 is corrupt and was skipped: index.json: truncated: 3 of" in caplog.text


def test_a_file_that_is_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    at = Path(save(tmp_path, {"x": torch.ones(9000)})) / "step-00000001"
    for left in (0, 100):
        with stagereg.open_checkpoint(at) as checkpoint:
            content = (at / DATA).read_bytes()
            os.truncate(at / DATA, left)
            with pytest.raises(CheckpointError, match=r"'x' of .* was not read"):
                checkpoint["x"]
            (at / DATA).write_bytes(content)


def test_a_directory_of_plain_torch_is_opened_without_pickle(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    dcp.save({"model": model.state_dict(), "lr": 0.1}, checkpoint_id=tmp_path, no_dist=True)
    with stagereg.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.step, checkpoint.manifest, checkpoint.verified) == (None, None, False)
        assert all(alike(checkpoint[f"model.{name}"], x) for name, x in model.state_dict().items())
        assert checkpoint.entry("lr") == 0.1
    with pytest.raises(CheckpointError, match="plain torch wrote it, without checksums"):
        stagereg.open_checkpoint(tmp_path, verify=True)


# -- restoring some names


def test_restoring_some_names_reads_their_bytes_alone(tmp_path: Path) -> None:
    big, some = torch.ones(16 * MIB), torch.arange(MIB, dtype=torch.float32)
    root = save(tmp_path, {"big": {"a": big, "b": big + 1}, "some": some, "n": 3})
    wanted = {"some": torch.zeros(MIB), "n": 0}
    with Checkpointer(root, restore=Restore(verify="fast"), stager=BlockingAsyncStager()) as checkpointer:
        before = bytes_read()
        checkpointer.restore(wanted)
        read = bytes_read() - before
    assert wanted["n"] == 3
    assert torch.equal(wanted["some"], some)
    assert some.nbytes <= read < some.nbytes + MIB
