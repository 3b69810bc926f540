"""Copies of another dtype than the objects: a warning in the first save, an error at restore that names the option, and
with the option an exact conversion, however the objects are split and whatever wrote the files."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Restore
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingStager
from stagereg.testing import run_ranks

from ...support import splits
from ...support.installed import needs


class HalfStager(BlockingStager):
    """Casts all of float32 to bfloat16."""

    def stage(self, state_dict: Any) -> Any:
        return tree_map(lambda x: x.bfloat16() if _is_float(x) else x, super().stage(state_dict))


class IntStager(BlockingStager):
    """Rounds the matrices of a model."""

    def stage(self, state_dict: Any) -> Any:
        staged: Any = super().stage(state_dict)
        model = {name: x.int() if x.ndim == 2 else x for name, x in staged["model"].items()}
        return {**staged, "model": model}


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32


def made() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "loss": torch.ones(3) / 3, "n": 0}


def stepped(state: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    for _ in range(steps):
        state["model"](torch.randn(6, 4)).square().sum().backward()
        state["optimizer"].step()
    return state


def _tensors(*states: Any) -> Iterable[tuple[Tensor, Tensor]]:
    one, other = ([*state["model"].state_dict().values(), state["loss"]] for state in states)
    yield from zip(one, other, strict=True)
    for p, q in zip(*(state["model"].parameters() for state in states), strict=True):
        one, other = (state["optimizer"].state[x] for state, x in zip(states, (p, q), strict=True))
        yield from ((one[key], other[key]) for key in one)


@pytest.mark.parametrize("read", ["each", pytest.param("once", marks=needs("buckets"))])
@pytest.mark.parametrize("storage", ["dcp", "torch_dcp", pytest.param("safetensors", marks=needs("interop"))])
def test_with_the_option_what_was_saved_in_half_is_converted_exactly(tmp_path: Path, storage: str, read: Any) -> None:
    saved = stepped(made(), 3)
    with Checkpointer(str(tmp_path), stager=HalfStager(), storage=stagereg.build("storage", storage)) as checkpointer:
        checkpointer.save(3, saved)
    for restored in (made(), stepped(made())):  # with and without a state of the optimizer
        with Checkpointer(str(tmp_path), restore=Restore(cast=True, read=read)) as checkpointer:
            assert checkpointer.restore(restored) == 3
        for x, y in _tensors(saved, restored):
            assert x.dtype == y.dtype
            assert torch.equal(x.bfloat16().to(x.dtype) if _is_float(x) else x, y)


def test_without_the_option_the_error_names_it_and_nothing_has_changed(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), stager=HalfStager()) as checkpointer:
        checkpointer.save(3, stepped(made()))
    fresh = made()
    before = [x.clone() for x in fresh["model"].state_dict().values()]
    expected = pytest.raises(CheckpointError, match=r"restore=Restore\(cast=True\)")
    with Checkpointer(str(tmp_path)) as checkpointer, expected:
        checkpointer.restore(fresh)
    assert all(map(torch.equal, before, fresh["model"].state_dict().values()))


def test_the_option_converts_between_floats_of_one_shape_alone(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.BatchNorm1d(3)})
    whole = torch.nn.BatchNorm1d(3)
    whole.running_mean = torch.zeros(3, dtype=torch.int32)
    for other in (whole, torch.nn.BatchNorm1d(4)):
        with (
            Checkpointer(str(tmp_path), restore=Restore(cast=True)) as checkpointer,
            pytest.raises(CheckpointError, match="here") as got,
        ):
            checkpointer.restore({"model": other})
        assert "cast" not in str(got.value)


def test_a_step_counter_in_half_precision_counts_on(tmp_path: Path) -> None:
    saved = stepped(made())
    for each in saved["optimizer"].state.values():
        each["step"] = torch.tensor(256.0, dtype=torch.bfloat16)
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(3, saved)
        checkpointer.restore(restored := made())
    assert {each["step"].item() for each in stepped(restored)["optimizer"].state.values()} == {257.0}


def cast_across(rank: int, world_size: int, root: str) -> list[str]:
    """Save splits of a model of bfloat16, restore them into others of float32; return what is not as it was."""
    warnings.simplefilter("ignore")  # torch's own, of FSDP1
    wrong = []
    ways = itertools.product(("dcp", "safetensors"), ("each", "once"))
    pairs = [("fsdp2_all", "fsdp2_all"), ("fsdp2_all", "fsdp1"), ("tp", "ddp"), ("ddp", "fsdp2")]
    for number, ((source, target), (storage, read)) in enumerate(zip(pairs, ways, strict=True)):
        saved, restored = (splits.Split(dist.group.WORLD, world_size, seed) for seed in (1, 2))
        splits.MAKERS[source][0](saved)
        saved.parts[0].bfloat16()
        saved.step()
        splits.MAKERS[target][0](restored)
        if number % 2:
            restored.step()
        options: dict[str, Any] = {"storage": stagereg.build("storage", storage)}
        with Checkpointer(f"{root}/{number}", restore=Restore(cast=True, read=read), **options) as checkpointer:
            checkpointer.save(1, saved.state)
            checkpointer.restore(restored.state)
        expected = {name: _widened(x) for name, x in saved.whole().items()}
        found = restored.whole()
        wrong += [f"{source} {target} {name}" for name in expected if expected[name] != found.get(name)]
        with Checkpointer(f"{root}/{number}") as checkpointer:
            try:
                checkpointer.restore(restored.state)
            except CheckpointError as error:
                wrong += [] if "restore=Restore(cast=True)" in str(error) else [str(error)]
            else:
                wrong.append(f"{target} took it")
    return wrong


def _widened(x: Any) -> Any:
    if type(x) is not tuple or x[0] != torch.bfloat16:
        return x
    return splits.full(torch.tensor(x[2], dtype=torch.uint8).view(torch.bfloat16).view(x[1]).float())


@pytest.mark.slow
def test_sharded_tensors_are_converted_exactly_by_both_ways_to_read(tmp_path: Path) -> None:
    assert run_ranks(cast_across, 2, args=(str(tmp_path),), timeout_s=100) == [[], []]
