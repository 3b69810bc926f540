"""docs/format.md is enough to read a checkpoint: JSON and raw bytes, without torch."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg import Checkpointer
from stagereg.registry import build

pytest.importorskip("numpy")

from ..support.format_reader import FormatReader


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("storage", ["dcp", "safetensors"])
def test_another_program_reads_what_was_saved(tmp_path: Path, storage: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": model,
        "optimizer": optimizer,
        "values": {
            1: (2, 3),
            "text": "ü\ud800",
            "inf": math.inf,
            "list": [1, None],
            "count": collections.Counter("aab"),
            "bytes": b"x",
        },
        "tensors": [tied, tied, tied.t(), tied[:, 1], torch.empty(0, 3), torch.tensor(True), torch.tensor(7)],
    }
    with Checkpointer(str(tmp_path), storage=build("storage", storage)) as checkpointer:
        checkpointer.save(3, state)
    reader = FormatReader(tmp_path / "step-00000003")
    assert reader.entry("stagereg.step") == reader.manifest["step"] == 3
    assert reader.entry("stagereg.rng.rank0")["torch"] == torch.get_rng_state().numpy().tobytes()
    for name, value in state.items():
        saved = value.state_dict() if hasattr(value, "state_dict") else value
        assert plain(reader.entry(name)) == plain(dict(saved) if isinstance(saved, dict) else saved), name
