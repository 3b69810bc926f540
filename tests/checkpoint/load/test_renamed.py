"""Layers and entries under other names, and new ones: what is restored, and what a refusal proposes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.base.option_text as option_text
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Restore
from stagereg.data import ResumableSampler
from stagereg.errors import CheckpointError, ConfigError
from stagereg.testing import run_ranks

from ...support.faulty_storage import flip
from ...support.installed import needs
from ..state.test_nested import Counting, refused, restore, save


class Block(torch.nn.Module):
    """A linear layer, a norm with buffers, and a parameter; 16 rows, which two ranks can shard."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.scale = torch.nn.Parameter(torch.rand(width, 4))


@pytest.fixture(autouse=True)
def built_from_a_config() -> Iterator[None]:
    """Have messages write options as a config has them, which the tests follow."""
    with option_text.in_config({"checkpoint": "checkpoint"}):
        yield


def net(seed: int, *names: str) -> Any:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: Block() for name in names})


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step whose gradients differ in each element, and follow from the parameters alone."""
    for x in model.parameters():
        x.grad = (x * 1.7 + 0.3).detach()
    optimizer.step(lambda: torch.ones(()))


def program(seed: int, *names: str, kind: Any = torch.optim.AdamW, steps: int = 0, **options: Any) -> dict[str, Any]:
    model = net(seed, *names)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def differing(one: dict[str, Any], other: dict[str, Any], pairs: dict[str, str]) -> list[str]:
    """The tensors of layers that differ between two programs, those of the optimizer included."""
    found = []
    for old, new in pairs.items():
        mine, theirs = one["model"][old], other["model"][new]
        for key, x in mine.state_dict().items():
            found += [f"{new}.{key}"] * (not torch.equal(full(x), full(theirs.state_dict()[key])))
        for (key, x), y in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            states = one["optimizer"].state.get(x, {}), other["optimizer"].state.get(y, {})
            same = states[0].keys() == states[1].keys() and all(equal(v, states[1][k]) for k, v in states[0].items())
            found += [f"state of {new}.{key}"] * (not same)
    return found


def full(x: Any) -> torch.Tensor:
    found: torch.Tensor = (x.full_tensor() if isinstance(x, DTensor) else x).detach()
    return found


def equal(one: Any, other: Any) -> bool:
    return torch.equal(full(one), full(other)) if isinstance(one, torch.Tensor) else bool(one == other)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),  # which has state before the first step
    "asgd": (torch.optim.ASGD, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_beside_a_renamed_and_a_new_layer_training_goes_on_exactly(name: str, tmp_path: Path) -> None:
    kind, options = OPTIMIZERS[name]
    saved = program(1, "a", "b", kind=kind, steps=2, **options)
    save(tmp_path, saved)
    mine = program(2, "c", "inp", "b", kind=kind, **options)
    untouched = copy.deepcopy(mine)
    restore(tmp_path, mine, restore=Restore(rename={"a": "inp"}, allow_missing=["c.*"]))
    pairs = {"a": "inp", "b": "b"}
    assert differing(saved, mine, pairs) == []
    assert differing(untouched, mine, {"c": "c"}) == []
    for each in (saved, mine, untouched):
        step(each["model"], each["optimizer"])
        step(each["model"], each["optimizer"])
    assert differing(saved, mine, pairs) == []
    assert differing(untouched, mine, {"c": "c"}) == []


def test_state_that_is_one_for_all_parameters_begins_from_scratch_where_the_run_says_so(tmp_path: Path) -> None:
    saved = program(1, "a", kind=torch.optim.LBFGS, steps=1)
    save(tmp_path, saved)
    mine = program(2, "a", "c", kind=torch.optim.LBFGS)
    text = refused(lambda: restore(tmp_path, mine, restore=Restore(allow_missing=["c.*"])))
    assert "LBFGS has one state for all parameters, and c.scale, c.linear.weight, " in text
    assert "To begin 'optimizer' alone from scratch, add checkpoint.restore.allow_missing=[optimizer]" in text
    restore(tmp_path, mine, restore=Restore(allow_missing=["c.*", "optimizer"]))
    assert torch.equal(mine["model"]["a"].scale, saved["model"]["a"].scale)
    assert not mine["optimizer"].state


@pytest.mark.parametrize("names", [("a", "inp"), ("c", "inp")], ids=["the new one has the old name", "another name"])
def test_the_options_may_stay_in_a_command_that_is_started_again(names: Sequence[str], tmp_path: Path) -> None:
    save(tmp_path, program(1, "a", steps=1))
    how = Restore(rename={"a": "inp"}, allow_missing=[f"{names[0]}.*"])
    mine = restore(tmp_path, program(2, *names), restore=how)
    step(mine["model"], mine["optimizer"])
    with Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.save(2, mine)
    again = restore(tmp_path, program(3, *names), restore=how)
    assert differing(mine, again, dict(zip(names, names, strict=True))) == []


def test_a_module_that_is_now_inside_of_another_one_or_no_longer_is_restored(tmp_path: Path) -> None:
    inner, whole = program(1, "a", "b", steps=1), torch.nn.Module()
    whole.backbone = inner["model"]
    outer = {"model": whole, "optimizer": inner["optimizer"]}
    for path, saved, wraps, rename in (
        (tmp_path / "in", inner, True, {"model": "model.backbone"}),
        (tmp_path / "out", outer, False, {"model.backbone": "model"}),
    ):
        save(path, saved)
        mine = program(2, "a", "b")
        holder = torch.nn.Module()
        holder.backbone = mine["model"]
        for _ in range(2):  # the second time nothing is renamed any more
            state = {**mine, "model": holder} if wraps else mine
            restore(path, state, restore=Restore(rename=rename))
            assert differing(inner, mine, {"a": "a", "b": "b"}) == []
            with Checkpointer(path, every=1) as checkpointer:
                checkpointer.save(2, state)


def test_of_two_modules_with_the_same_names_one_is_renamed(tmp_path: Path) -> None:
    def both(seed: int, layer: str) -> dict[str, Any]:
        state = {"gen": net(seed, layer, "out"), "disc": net(seed + 1, "a", "out")}
        every = [x for module in state.values() for x in module.parameters()]
        return {**state, "optimizer": torch.optim.Adam(every)}

    saved, mine = both(1, "a"), both(5, "inp")
    for module in (saved["gen"], saved["disc"]):
        step(module, saved["optimizer"])
    save(tmp_path, saved)
    restore(tmp_path, mine, restore=Restore(rename={"gen.a": "gen.inp"}))
    for of, pairs in {"gen": {"a": "inp", "out": "out"}, "disc": {"a": "a", "out": "out"}}.items():
        one, other = ({"model": each[of], "optimizer": each["optimizer"]} for each in (saved, mine))
        assert differing(one, other, pairs) == []


def test_entries_are_renamed_each_ranks_own_and_those_in_containers_too(tmp_path: Path) -> None:
    saved = program(1, "a", steps=1)
    sampler = ResumableSampler(range(9))
    sampler.advance(4)
    more = {"data": sampler, "loss": 3.0, "parts": {"x": Counting(7)}}
    save(tmp_path, {"net": saved["model"], "adam": saved["optimizer"], **more})
    mine, at = program(2, "a"), ResumableSampler(range(9))
    counting = Counting(0)
    state = {**mine, "sampler": at, "best": 0.0, "pieces": {"x": counting}}
    rename = {"net": "model", "adam": "optimizer", "data": "sampler", "loss": "best", "parts": "pieces"}
    restore(tmp_path, state, restore=Restore(rename=rename))
    assert differing(saved, mine, {"a": "a"}) == []
    assert (len(at), state["best"], counting.count) == (5, 3.0, 7)


def test_what_begins_from_scratch_is_logged_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, program(1, "a"))
    restore(tmp_path, {**program(2, "a", "c"), "epoch": 3}, restore=Restore(allow_missing=["c.sc*", "c.*", "epoch"]))
    [text] = [each.getMessage() for each in caplog.records if "started from scratch" in each.getMessage()]
    assert "does not contain epoch, model.c.scale, model.c.linear.weight, " in text


def test_a_misspelt_name_is_an_error_with_the_nearest_one(tmp_path: Path) -> None:
    save(tmp_path, program(1, "a"))
    for names, close in ((["imp.*"], "inp"), (["optimiser"], "optimizer"), (["inp.*", "model.imp.*"], "model.inp")):
        text = refused(lambda: restore(tmp_path, program(2, "a", "inp"), restore=Restore(allow_missing=names)))  # noqa: B023
        assert f"allow_missing has '{names[-1]}', which matches nothing in the state. Did you mean '{close}'?" in text
    restored = program(2, "a")
    text = refused(lambda: restore(tmp_path, restored, restore=Restore(allow_missing=["b.*"])))
    assert "allow_missing has 'b.*', which matches nothing in the state" in text


@pytest.mark.parametrize("read", ["each", pytest.param("once", marks=needs("buckets"))])
def test_a_new_layer_keeps_nothing_of_a_corrupt_checkpoint_that_had_it(read: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.save(1, program(1, "a"))
        checkpointer.save(2, program(1, "a", "c"))
    flip(tmp_path / "step-00000002" / "__0_0.distcp")
    mine = program(2, "a", "c")
    before = copy.deepcopy(mine)
    how = Restore(allow_missing=["c.*"], read=read)
    if read == "each":  # the files are checked before anything is read
        restore(tmp_path, mine, restore=how)
        assert differing(before, mine, {"c": "c"}) == []
        return
    text = refused(lambda: restore(tmp_path, mine, restore=how))
    assert "it does not have model.c.linear.bias, model.c.linear.weight" in text
    assert "Do not train with them" in text


def test_renames_that_a_later_run_could_not_tell_apart_are_refused() -> None:
    for rename in ({"a": "b", "b": "a"}, {"a": "b", "b.x": "c"}, {"a": "b.x", "b": "c"}):
        with pytest.raises(ConfigError, match=r"'b.*' is a new name, and '.*' an old one"):
            Restore(rename=rename)
    for wrong, text in (("a", "must be a mapping"), ({"a": ""}, "new name of 'a'"), ({"a": 3}, "cannot be 3")):
        with pytest.raises(ConfigError, match=text):
            Restore(rename=wrong)  # type: ignore[arg-type]
    assert Restore(rename={"model": {"a": "inp", "b": {"0": "c"}}}).rename == {"model.a": "inp", "model.b.0": "c"}


def test_two_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    save(tmp_path, program(1, "a", "b"))
    text = refused(lambda: restore(tmp_path, program(2, "c"), restore=Restore(rename={"a": "c", "b": "c"})))
    assert "its 'a.scale' and 'b.scale' would both be named 'c.scale'" in text


# -- what a refusal proposes

PROPOSED = re.compile(r"'checkpoint\.(restore\.[^']*)'")


def followed(text: str) -> Restore:
    """The options that a message proposes, as Hydra reads them from a command line."""
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(PROPOSED.findall(text)):
        found[override.key_or_group.removeprefix("restore.")] = override.value()
    return Restore(**{key: {str(k): v for k, v in x.items()} if isinstance(x, dict) else x for key, x in found.items()})


CHANGED: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "one renamed": (["a", "b"], ["inp", "b"], ["4 more"]),
    "one new": (["a"], ["a", "c"], ["To begin c.* from scratch"]),
    "one renamed, one new": (["a", "b"], ["inp", "b", "c"], ["If 'a' in it is", "here, add", "To begin "]),
    "all renamed": (["x1", "x2"], ["y1", "y2"], ["rename={x1: y1, x2: y2}"]),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_the_options_that_a_refusal_proposes_restore_the_rest(kind: str, tmp_path: Path) -> None:
    before, after, _ = CHANGED[kind]
    saved = program(1, *before, steps=1)
    save(tmp_path, saved)
    mine = program(2, *after)
    text = refused(lambda: restore(tmp_path, mine))
    assert "missing in the checkpoint" in text
    restore(tmp_path, mine, restore=followed(text))
    assert not differing(saved, mine, {name: name for name in before if name in after})
    assert sum(not differing(saved, mine, {old: new}) for old in before for new in after) == len(before)


def test_the_proposed_names_are_the_nearest_of_the_same_shape(tmp_path: Path) -> None:
    saved = net(1, "encoder", "decoder")
    saved["encod"] = Block(8)  # as near, of another shape
    save(tmp_path, {"model": saved})
    text = refused(lambda: restore(tmp_path, {"model": net(2, "enc", "decoder")}))
    assert "'checkpoint.restore.rename={encoder: enc}'" in text
    assert "8 missing in the checkpoint: enc.scale, enc.linear.weight" in text
    assert "16 in the checkpoint but not here: encod.linear.bias" in text


def test_a_wrapper_around_all_names_is_named(tmp_path: Path) -> None:
    holder = torch.nn.Module()
    holder.module = net(1, "a")
    save(tmp_path / "plain", {"model": net(2, "a")})
    text = refused(lambda: restore(tmp_path / "plain", {"model": holder}))
    assert ". DataParallel and DistributedDataParallel add 'module' to names" in text
    restore(tmp_path / "plain", {"model": holder}, restore=followed(text))


@needs("interop")
@pytest.mark.parametrize("before", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_wrappers_that_torch_saved_are_left_out(before: str, tmp_path: Path) -> None:
    model = net(1, "a")
    names = {f"{before}{key}": x for key, x in model.state_dict().items()}
    inner = {key.replace("a.", "a._orig_mod."): x for key, x in names.items()}
    for at, (state, plain) in enumerate(((names, False), (inner, False), (names, True), (inner, True))):
        if plain:
            dcp.save({"model": state}, checkpoint_id=tmp_path / f"{at}/step-3")
        else:
            save(tmp_path / str(at), {"model": state})
        mine = net(2, "a")
        more = {"resume": str(tmp_path / f"{at}/step-3")} if plain else {}
        restore(tmp_path / ("own" if plain else str(at)), {"model": mine}, **more)
        assert all(torch.equal(x, mine.state_dict()[key]) for key, x in model.state_dict().items())


@needs("interop")
def test_a_plain_checkpoint_of_which_all_layers_are_renamed_is_restored(tmp_path: Path) -> None:
    saved, mine = program(1, "a", steps=1), program(2, "inp")
    weights, states = get_state_dict(saved["model"], saved["optimizer"])
    dcp.save({"app": {"net": weights, "optim": states}}, checkpoint_id=tmp_path / "step-3")
    how = Restore(rename={"a": "inp"})
    restore(tmp_path / "own", mine, restore=how, resume=str(tmp_path / "step-3"))
    assert differing(saved, mine, {"a": "inp"}) == []


def test_a_refusal_of_a_large_model_fits_on_a_screen(tmp_path: Path) -> None:
    def large(name: str) -> Any:
        return torch.nn.ModuleDict({f"{name}{i}": torch.nn.Linear(1, 1) for i in range(300)} | {"x": torch.nn.ReLU()})

    for at, (before, after) in enumerate((("old", "new"), ("o" * 90, "n" * 90))):
        save(tmp_path / str(at), {"model": large(before)})
        text = refused(lambda: restore(tmp_path / str(at), {"model": large(after)}))  # noqa: B023
        assert "600 missing in the checkpoint" in text
        assert len(text) < 40 * 80
        assert text.count(": ") < 20


def test_a_schedule_of_fewer_groups_is_refused(tmp_path: Path) -> None:
    def scheduled(seed: int, *names: str) -> dict[str, Any]:
        model = net(seed, *names)
        optimizer = torch.optim.AdamW([{"params": [*model[name].parameters()], "lr": 0.1} for name in names])
        return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    save(tmp_path, scheduled(1, "a"))
    mine = scheduled(2, "a", "c")
    text = refused(lambda: restore(tmp_path, mine, restore=Restore(allow_missing=["c.*"])))
    assert "it was saved with 1 parameter groups, but the optimizer here has 2" in text
    assert "checkpoint.restore.allow_missing=[scheduler]" in text
    restore(tmp_path, mine, restore=Restore(allow_missing=["c.*", "scheduler"]))


class Versioned(torch.nn.Linear):
    """Takes older states for ones with the sign reversed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, local_metadata, *more)


def test_a_new_layer_is_not_taken_for_one_of_an_older_version_nor_a_renamed_one(tmp_path: Path) -> None:
    def versioned(*names: str) -> Any:
        return torch.nn.ModuleDict({name: Versioned(2, 2) for name in names})

    saved, mine = versioned("a"), versioned("inp", "c")
    before = mine["c"].weight.clone()
    save(tmp_path, {"model": saved})
    restore(tmp_path, {"model": mine}, restore=Restore(rename={"a": "inp"}, allow_missing=["c.*"]))
    assert torch.equal(mine["inp"].weight, saved["a"].weight)
    assert torch.equal(mine["c"].weight, before)


# -- on several ranks


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.values():
            fully_shard(layer, mesh=mesh)
    return model


def on_ranks(rank: int, world_size: int, root: str, cases: Sequence[Sequence[str]]) -> list[Any]:
    """Save a program with the old names, and restore it with new ones and another wrapper; return what differs."""
    wrong: list[Any] = []
    for case in cases:
        before, after, read, source = case
        saved = {"model": net(1, "a", "b")}
        model = wrapped(saved["model"], before)
        saved["optimizer"] = torch.optim.AdamW(saved["model"].parameters(), lr=0.02)
        step(saved["model"], saved["optimizer"])
        mine = {"model": net(2, "inp", "b", "c")}
        start = copy.deepcopy(mine["model"].state_dict())
        new = wrapped(mine["model"], after)
        mine["optimizer"] = torch.optim.AdamW(mine["model"].parameters())
        path, more = f"{root}/{'-'.join(case)}", {}
        if source == "plain":
            weights, states = get_state_dict(model, saved["optimizer"])
            dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{path}/step-1")
            more["resume"] = f"{path}/step-1"
        if source == "tier":
            more |= {"tier": stagereg.build("tier", "disk", dir=f"{path}/tier", every=1), "every": 100}
        if source != "plain":
            with Checkpointer(f"{path}/own", **more) as checkpointer:
                checkpointer.save(1, {"model": model, "optimizer": saved["optimizer"]})
        how = Restore(rename={"a": "inp"}, allow_missing=["c.*"], read=read)  # type: ignore[arg-type]
        with Checkpointer(f"{path}/own", restore=how, **more) as checkpointer:
            assert checkpointer.restore({"model": new, "optimizer": mine["optimizer"]}) == 1
        wrong += [(case, each) for each in differing(saved, mine, {"a": "inp", "b": "b"})]
        now = mine["model"].state_dict()
        wrong += [(case, key) for key in start if key.startswith("c.") and not torch.equal(start[key], full(now[key]))]
        wrong += [(case, "state of c") for x in mine["model"]["c"].parameters() if x in mine["optimizer"].state]
        step(mine["model"], mine["optimizer"])
    return wrong


CASES = [
    ("ddp", "fsdp2", "each", "store"),
    ("fsdp2", "ddp", "once", "store"),
    ("fsdp2", "fsdp2", "each", "tier"),
    ("fsdp2", "ddp", "each", "plain"),
]


@needs("interop")
@needs("buckets")
@needs("tiers")
def test_with_any_wrapper_and_from_any_source_layers_are_renamed_and_added(tmp_path: Path) -> None:
    assert run_ranks(on_ranks, nproc=2, args=(str(tmp_path), CASES), timeout_s=120) == [[], []]


def stages(rank: int, world_size: int, root: str) -> tuple[list[str], str]:
    """Restore two pipeline stages of which the second one has a new layer."""
    names = ["a"] if rank == 0 else ["b"]
    saved = program(1 + rank, *names, steps=1)
    with Checkpointer(root, every=1) as checkpointer:
        checkpointer.save(1, saved)
    mine = program(5, *names, *["c"] * rank)
    with Checkpointer(root, every=1, restore=Restore(allow_missing=["c.*"])) as checkpointer:
        checkpointer.restore(mine)
    with (
        Checkpointer(root, every=1, restore=Restore(allow_missing=["c.*", "z.*"])) as checkpointer,
        pytest.raises(CheckpointError) as raised,
    ):
        checkpointer.restore(mine)
    return differing(saved, mine, dict(zip(names, names, strict=True))), str(raised.value)


def test_a_new_layer_of_one_pipeline_stage_is_nothing_unknown_on_the_others(tmp_path: Path) -> None:
    for wrong, text in run_ranks(stages, nproc=2, args=(str(tmp_path),)):
        assert wrong == []
        assert "has 'z.*', which matches nothing in the state" in text
