"""``on_commit=huggingface`` writes the model of a checkpoint as ``from_pretrained`` reads it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg.assembly import Checkpointer


def needs(package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (make frameworks has it)")


def save(root: Path, component: Any, state: Callable[[int], dict[str, Any]] = lambda step: {"x": step}) -> Checkpointer:
    with Checkpointer(str(root), keep=9, on_commit={"it": component}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    return checkpointer


@needs("transformers")
def test_from_pretrained_reads_what_huggingface_writes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model = GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "config")
    component = stagereg.build(
        "on_commit", "huggingface", dir=f"{tmp_path}/out/{{step}}", pretrained=f"{tmp_path}/config", max_shard_size=8192
    )
    stats = save(tmp_path / "c", component, lambda step: {"model": model}).stats
    assert (stats.on_commit_calls, stats.on_commit_failures) == (2, 0)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "2")
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


@needs("huggingface_hub")
def test_huggingface_uploads_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[Any] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **given: calls.append(given))
    state = {"model": torch.nn.Linear(2, 2)}
    for upload in (None, "me/mine"):
        made = stagereg.build("on_commit", "huggingface", dir=str(tmp_path / "out"), upload=upload)
        save(tmp_path / f"c{upload is None}", made, lambda step: state)
    assert [each["commit_message"] for each in calls] == ["step 1", "step 2"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_an_entry_that_is_not_there_is_reported(tmp_path: Path, caplog: Any) -> None:
    save(tmp_path / "c", stagereg.build("on_commit", "huggingface", dir=str(tmp_path / "out")))
    assert caplog.text.count("on_commit it failed: stagereg.errors.CheckpointError") == 2
