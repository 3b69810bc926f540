"""A restore keeps values apart that were saved apart, where the new program has them in one memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagereg import Checkpointer, per_rank
from stagereg.errors import CheckpointError


def restored(directory: Path, saved: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, saved)
    with Checkpointer(directory) as checkpointer:
        checkpointer.restore(live)
    return live


def filled(value: float) -> nn.Linear:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


@pytest.mark.parametrize("names", [("model", "best"), ("best", "model")])
@pytest.mark.parametrize("inner", [lambda state: state, lambda state: {"of": [state]}])
def test_a_plain_value_in_the_memory_of_the_model_gets_memory_of_its_own(
    tmp_path: Path, names: tuple[str, str], inner: Callable[[Any], Any]
) -> None:
    saved = {"model": filled(3.0), "best": inner(filled(2.0).state_dict())}
    model = filled(0.0)
    weight = model.weight
    live = {"model": model, "best": inner(model.state_dict())}
    restored(tmp_path, {name: saved[name] for name in names}, state := {name: live[name] for name in names})
    best = state["best"] if "of" not in state["best"] else state["best"]["of"][0]
    assert model.weight is weight
    assert {float(x) for x in model.weight.flatten()} == {3.0}
    assert {float(x) for each in best.values() for x in each.flatten()} == {2.0}


def test_values_that_agree_keep_the_shared_memory(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        model, flat = filled(value), torch.arange(6.0) * value
        return {"model": model, "best": model.state_dict(), "flat": flat, "part": flat[2:4], "all": [flat, flat]}

    live = state(0.0)
    flat = live["flat"]
    restored(tmp_path, state(2.0), live)
    live["model"].weight.data.fill_(7.0)
    assert torch.equal(live["best"]["weight"], live["model"].weight)
    assert live["flat"] is flat
    assert live["all"][0] is flat
    assert live["all"][1] is flat
    assert live["part"].data_ptr() == flat[2:].data_ptr()
    assert flat.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_conjugate_and_its_parts_keep_the_shared_memory(tmp_path: Path) -> None:
    """As in a module that keeps a filter and its conjugate, which torch computes when the values are read."""

    def state(x: torch.Tensor) -> dict[str, Any]:
        module = nn.Module()
        for name, each in {"x": x, "conj": x.conj(), "imag": x.conj().imag}.items():
            module.register_buffer(name, each)
        return {"module": module, "plain": [x.mH, torch._neg_view(x[0])]}

    x = torch.randn(2, 3, dtype=torch.cfloat)
    live = state(torch.zeros_like(x))
    restored(tmp_path, state(x), live)
    module, (transposed, negative) = live["module"], live["plain"]
    assert torch.equal(module.x, x)
    assert torch.equal(module.conj, x.conj())
    assert torch.equal(module.imag, -x.imag)
    assert torch.equal(transposed, x.mH)
    assert torch.equal(negative, -x[0])
    module.x.zero_()
    assert not any(each.any() for each in (module.conj, module.imag, transposed, negative))


def test_a_conjugate_that_was_saved_with_other_values_gets_memory_of_its_own(tmp_path: Path) -> None:
    x, saved = torch.zeros(3, dtype=torch.cfloat), torch.randn(3, dtype=torch.cfloat)
    live = restored(tmp_path, {"x": saved, "conj": saved.clone()}, {"x": x, "conj": x.conj()})
    assert torch.equal(live["x"], saved)
    assert torch.equal(live["conj"], saved)


def test_a_single_element_of_any_stride_keeps_the_shared_memory(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        x = torch.empty_strided((1,), (7,)).fill_(value)
        return {"one": {"x": x}, "other": [x]}

    live = restored(tmp_path, state(3.0), state(0.0))
    assert live["one"]["x"] is live["other"][0]
    assert live["one"]["x"].tolist() == [3.0]


@pytest.mark.parametrize("top", [True, False])
def test_overlapping_views_get_the_values_that_were_saved(tmp_path: Path, top: bool) -> None:
    memory = torch.zeros(6)
    saved, live = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}, {"a": memory[:4], "b": memory[2:]}
    state = restored(tmp_path, saved if top else {"x": saved}, live if top else {"x": live})
    found = state if top else state["x"]
    assert torch.equal(found["a"], torch.ones(4))
    assert torch.equal(found["b"], torch.full((4,), 2.0))


def test_a_container_in_two_places_becomes_two_if_their_values_differ(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"x": [{"n": 1}, {"n": 2}], "t": [torch.ones(2), torch.zeros(2)], "y": [[float("nan")]] * 2}
    live = restored(tmp_path, saved, {"x": [{"n": 0}] * 2, "t": [torch.zeros(2)] * 2, "y": [[0.0]] * 2})
    assert live["x"] == saved["x"]
    assert [each.tolist() for each in live["t"]] == [[1.0, 1.0], [0.0, 0.0]]
    assert live["y"][0] is live["y"][1]


class Tied(nn.Module):
    def __init__(self, tied: bool, head: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        nn.init.ones_(self.embed.weight)
        nn.init.constant_(self.head.weight, head)
        if tied:
            self.embed.weight = self.head.weight


def test_tied_weights_refuse_values_that_differ_before_anything_changes(tmp_path: Path) -> None:
    live: dict[str, Any] = {"other": filled(0.0), "model": Tied(True, 5.0)}
    with pytest.raises(CheckpointError, match=r"'model\.\w+\.weight' and 'model\.\w+\.weight' share memory here"):
        restored(tmp_path, {"other": filled(1.0), "model": Tied(False, 2.0)}, live)
    assert float(live["other"].weight.sum()) == 0.0
    assert float(live["model"].embed.weight[0, 0]) == 5.0


def test_tied_weights_take_equal_values_that_were_saved_untied(tmp_path: Path) -> None:
    live = restored(tmp_path, {"model": Tied(False, 1.0)}, {"model": Tied(True, 5.0)})
    assert torch.equal(live["model"].head.weight, torch.ones(4, 2))


@pytest.mark.parametrize("names", [("model", "buffers"), ("buffers", "model")])
def test_buffers_that_each_rank_has_for_itself_come_back_into_their_module(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    def state(mean: float, own: float) -> dict[str, Any]:
        model, apart = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        model.running_mean.fill_(mean)
        apart.running_mean.fill_(own)
        return {"model": model, "buffers": per_rank([*apart.buffers()])}

    live = state(0.0, 0.0)
    live["buffers"] = per_rank([*live["model"].buffers()])
    restored(tmp_path, {name: state(1.0, 5.0)[name] for name in names}, {name: live[name] for name in names})
    assert live["model"].running_mean.tolist() == [5.0, 5.0]
    assert live["buffers"].value[0] is live["model"].running_mean
