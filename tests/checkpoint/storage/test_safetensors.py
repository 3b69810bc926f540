"""``safetensors`` writes files that other tools read, and names what they cannot hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stagereg
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.storage.safetensors import SafetensorsStorage
from stagereg.errors import ConfigError
from stagereg.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

safetensors = pytest.importorskip("safetensors.torch")


def save_shards(rank: int, world_size: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(0)])
    with Checkpointer(root, storage=SafetensorsStorage()) as saving:
        saving.save(1, {"x": x})


def test_torchs_reader_puts_shards_together_without_this_project(tmp_path: Path) -> None:
    run_ranks(save_shards, nproc=2, args=(str(tmp_path),))
    template = {"x": torch.zeros(5, 7)}
    dcp.load(template, storage_reader=HuggingFaceStorageReader(str(tmp_path / "latest")), no_dist=True)
    assert torch.equal(template["x"], torch.arange(35.0).view(5, 7))
    parts = [safetensors.load_file(file)["x"] for file in sorted((tmp_path / "latest").glob("shard-*.safetensors"))]
    assert torch.equal(torch.cat(parts), torch.arange(35.0).view(5, 7))


def test_without_the_package_the_error_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"pip install 'hydra-stagereg\[safetensors\]'"):
        stagereg.build("storage", "safetensors")


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.ones(2, dtype=torch.complex128), r"the format has no torch\.complex128"),
        (torch.ones(2).to_sparse(), r"torch\.sparse_coo"),
    ],
)
def test_a_tensor_it_cannot_hold_is_named(tmp_path: Path, x: torch.Tensor, why: str) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=rf"safetensors cannot hold 'model\.w': .*{why}"):
        dcp.save({"model": {"w": x}}, storage_writer=SafetensorsStorage(tmp_path), no_dist=True)


def test_load_file_reads_each_tensor_by_its_dotted_name(tmp_path: Path) -> None:
    model, base = torch.nn.Linear(3, 2), torch.arange(12.0).view(3, 4)
    views = {"a": base, "b": base, "c": base.t(), "d": base[1], "e": base[:, 0]}
    with Checkpointer(str(tmp_path), storage=SafetensorsStorage()) as saving:
        saving.save(1, {"model": model, "step": 7, **views})
    (file,) = (tmp_path / "latest").glob("*.safetensors")
    tensors = safetensors.load_file(file)
    for name, x in {**views, "model.weight": model.weight, "model.bias": model.bias}.items():
        assert torch.equal(tensors[name], x), name
