"""What torch's own functions have saved, in the layouts of those who call them, is restored into any split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from ...support import splits

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def layout(name: str, model: Any, optimizer: Any) -> dict[str, Any]:
    """The state that each of them gives to ``dcp.save``."""
    flat = name in ("torch flat", "torchtitan")
    weights, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    if name == "torchtitan":
        return {
            **weights,
            "optimizer": state,
            "lr_scheduler": {"last_epoch": 5},
            "train_state": {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(70)},
            "dataloader": None,
        }
    if name == "lightning":  # whose module has the network as an attribute
        groups = [{**group, "params": [f"net.{of}" for of in group["params"]]} for group in state["param_groups"]]
        named = {"state": {f"net.{of}": each for of, each in state["state"].items()}, "param_groups": groups}
        return {"state_dict": {f"net.{of}": x for of, x in weights.items()}, "optimizer_0": named}
    if name == "a recipe of torch":
        return {"app": {"model": weights, "optim": state}, "epoch": 3}
    return {"model": weights, "optim": state}


LAYOUTS = {
    "torch flat": ("model.", "optim.state."),
    "torch nested": ("model.", "optim.state."),
    "torchtitan": ("", "optimizer.state."),
    "lightning": ("state_dict.net.", "optimizer_0.state.net."),
    "a recipe of torch": ("app.model.", "app.optim.state."),
}
"""What stands before the names of parameters, and of their state."""


def opened(name: str, path: str) -> dict[str, Any]:
    """Parameters, buffers and optimizer state by name, read by one process."""
    weights, states = LAYOUTS[name]
    with stagereg.open_checkpoint(path) as checkpoint:
        found = {key: splits.full(x) for key, x in checkpoint.items()}
    every = {f"state.{key.removeprefix(states)}": x for key, x in found.items() if key.startswith(states)}
    others = {key: x for key, x in found.items() if not key.startswith(states) and key.startswith(weights)}
    return every | {f"model.{key.removeprefix(weights)}": x for key, x in others.items()}


def exchange(rank: int, world_size: int, root: str, cases: Sequence[tuple[str, str, str]]) -> list[Any]:
    """Save each layout from one split with torch's own functions, and restore it into another split."""
    groups, differing = splits.Groups(), []
    for name, source, target in cases:
        path, whole = f"{root}/{name} {source}/step-7", None
        make, size = splits.MAKERS[source]
        if rank < size:
            split = splits.Split(groups[size], size, seed=1)
            make(split)
            split.step()
            split.step()
            dcp.save(layout(name, split.parts[0], split.optimizers), checkpoint_id=path, process_group=groups[size])
            whole = split.whole()
        saved = splits.shown(whole)
        if rank == 0:
            tensors = {key for key in saved if not key.startswith("options.")}
            there = opened(name, path)
            differing += [(name, source, "opened", key) for key in tensors if there.get(key) != saved[key]]
        make, size = splits.MAKERS[target]
        with groups.checkpointer(size, f"{root}/own", resume=path) as keeper:
            if rank < size:
                split = splits.Split(groups[size], size, seed=2)
                make(split)
                assert keeper.restore({key: split.state[key] for key in ("model", "optimizer")}) == 7
                found = split.whole()
                keys = saved.keys() | found.keys()
                differing += [(name, source, target, key) for key in keys if found.get(key) != saved.get(key)]
    return differing


CASES = [
    ("torch nested", "tp", "zero"),
    ("torchtitan", "pp", "fsdp2"),
    ("lightning", "fsdp2", "plain"),
]


def test_what_others_saved_is_restored_into_any_split(tmp_path: Path) -> None:
    results = run_ranks(exchange, nproc=4, args=(str(tmp_path), CASES), timeout_s=120)
    assert results == [[]] * 4


def trained(options: dict[str, Any] | None = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer, after a step if ``options`` are given."""
    torch.manual_seed(0 if options is None else 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, **(options or {}))
    if options is not None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def restored(path: Path, state: dict[str, Any]) -> int | None:
    with Checkpointer(str(path.parent / "own"), resume=str(path), stager=BlockingAsyncStager()) as checkpointer:
        return checkpointer.restore(state)


def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    parts = [splits.full(x) for x in model.state_dict().values()]
    return (
        parts,
        [{key: splits.full(x) for key, x in each.items()} for each in state["state"].values()],
        [
            {key: splits.full(x) if isinstance(x, torch.Tensor) else x for key, x in group.items()}
            for group in state["param_groups"]
        ],
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_groups_and_their_options_are_those_that_were_saved(tmp_path: Path, name: str, lr: Any) -> None:
    model, optimizer = trained({"lr": lr})
    dcp.save(layout(name, model, optimizer), checkpoint_id=tmp_path / "there", no_dist=True)
    fresh = trained()
    step = restored(tmp_path / "there", dict(zip(("model", "optimizer"), fresh, strict=True)))
    assert step == (7 if name == "torchtitan" else 0)
    assert bits(*fresh) == bits(model, optimizer)
    with stagereg.open_checkpoint(tmp_path / "there") as checkpoint:  # as torch has it, with names
        entry, *way = LAYOUTS[name][1].partition(".state.")[0].split(".")
        found = checkpoint.entry(entry)
    found = found[way[0]] if way else found
    before = "net." if name == "lightning" else ""
    own = [before + of for of, _ in model.named_parameters()]
    assert [group["params"] for group in found["param_groups"]] == [own[:2], own[2:]]
    fresh = trained()
    fresh[1].load_state_dict(found)
    assert bits(model, fresh[1]) == bits(model, optimizer)


def test_numbered_states_are_taken_by_position(tmp_path: Path) -> None:
    model, optimizer = trained({"lr": 0.25})
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "seen": [torch.ones(2)]}
    dcp.save(saved, checkpoint_id=tmp_path / "epoch=0-step=12.ckpt", no_dist=True)
    fresh = trained()
    state = {"net": fresh[0], "adam": fresh[1], "epoch": 0, "seen": [torch.zeros(2)]}
    assert restored(tmp_path / "epoch=0-step=12.ckpt", state) == 12
    assert bits(*fresh) == bits(model, optimizer)
    assert (state["epoch"], state["seen"][0].tolist()) == (3, [1, 1])


def test_what_has_nothing_to_save_need_not_be_there(tmp_path: Path) -> None:
    model, _ = trained()
    dcp.save({"model": model.state_dict(), "hooks": {}}, checkpoint_id=tmp_path / "there", no_dist=True)
    state: dict[str, Any] = {"model": trained()[0], "hooks": {}}
    restored(tmp_path / "there", state)
    assert state["hooks"] == {}
    with pytest.raises(CheckpointError, match="The checkpoint has neither an entry 'epoch'"):
        restored(tmp_path / "there", {"epoch": 0})


def test_model_and_optimizer_may_be_directories_each(tmp_path: Path) -> None:
    model, optimizer = trained({"lr": 0.25})
    weights, state = get_state_dict(model, optimizer)
    for name, each in {"pytorch_model_fsdp_0": {"model": weights}, "optimizer_0": {"optimizer": state}}.items():
        dcp.save(each, checkpoint_id=tmp_path / name, no_dist=True)  # as accelerate does
    fresh = trained()
    restored(tmp_path / "pytorch_model_fsdp_0", {"model": fresh[0]})
    restored(tmp_path / "optimizer_0", {"optimizer": fresh[1]})
    assert bits(*fresh) == bits(model, optimizer)
    named = [*reversed([*trained()[0].named_parameters()])]  # by position these would be others
    by_name = torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:]}])
    restored(tmp_path / "optimizer_0", {"optimizer": by_name})
    for (_, x), y in zip(named, [*reversed([*model.parameters()])], strict=True):
        assert torch.equal(by_name.state[x]["exp_avg"], optimizer.state[y]["exp_avg"])
    assert [group["weight_decay"] for group in by_name.param_groups] == [0.5, 0.01]


def test_of_two_that_fit_the_one_of_that_name_is_taken(tmp_path: Path) -> None:
    models = {name: trained({"lr": lr}) for name, lr in (("generator", 0.25), ("critic", 0.5))}
    saved = {name: model.state_dict() for name, (model, _) in models.items()}
    saved |= {f"{name}_optim": get_state_dict(*pair, options=FLAT)[1] for name, pair in models.items()}
    dcp.save(saved | {"step": 9}, checkpoint_id=tmp_path / "there", no_dist=True)
    fresh = trained()
    assert restored(tmp_path / "there", {"critic": fresh[0], "critic_optim": fresh[1]}) == 9
    assert bits(*fresh) == bits(*models["critic"])
    before = bits(*fresh)
    for state, kinds in (({"model": fresh[0]}, ""), ({"model": fresh[0], "optim": fresh[1]}, "")):
        with pytest.raises(CheckpointError, match=f"'model' matches generator{kinds}, critic{kinds} equally well"):
            restored(tmp_path / "there", state)
    assert bits(*fresh) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {}}, "has neither an entry 'model' nor its parameters. It has epoch, optim"),
        ({"optim": {}}, "has neither an entry 'optimizer' nor its parameters. It has epoch, model"),
        (
            {"model": {"0.weight": torch.ones(4, 3), "1.bias": torch.ones(9)}},
            "2 missing in the checkpoint: 0.bias, 1.weight; 1 of an",
        ),
        ({"model": {"more": torch.ones(2)}}, "1 in the checkpoint but not here: more"),
        ({"epoch": print}, "'epoch' was not read: it contains builtins.print"),
        (
            {"optim": {"param_groups.0.weight.lr": print}},
            "'optim.param_groups.0.weight.lr' was not read: it contains builtins",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path, change: Any, message: str) -> None:
    model, optimizer = trained({"lr": 0.25})
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    saved: dict[str, Any] = {"model": weights, "optim": state, "epoch": 3}
    for name, parts in change.items():
        replaced = not parts or (name == "model" and "more" not in parts) or not isinstance(parts, dict)
        saved[name] = parts if replaced else {**saved[name], **parts}
    dcp.save(saved, checkpoint_id=tmp_path / "there", no_dist=True)
    fresh = trained()
    before = bits(*fresh)
    with pytest.raises(CheckpointError) as raised:
        restored(tmp_path / "there", {"model": fresh[0], "optimizer": fresh[1], "epoch": 0})
    assert message in str(raised.value)
    assert bits(*fresh) == before
