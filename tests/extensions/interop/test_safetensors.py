"""``safetensors`` writes files that other tools read, and names what they cannot hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.errors import ConfigError
from stagereg.extensions.interop.safetensors import SafetensorsStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

safetensors = pytest.importorskip("safetensors.torch")


def test_without_the_package_the_error_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"pip install './stagereg\[safetensors\]'"):
        stagereg.build("storage", "safetensors")


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.ones(2, dtype=torch.complex128), r"the format does not support torch\.complex128"),
        (torch.ones(2).to_sparse(), r"torch\.sparse_coo"),
    ],
)
def test_a_tensor_it_cannot_hold_is_named(tmp_path: Path, x: torch.Tensor, why: str) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=rf"safetensors cannot store 'model\.w': .*{why}"):
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
