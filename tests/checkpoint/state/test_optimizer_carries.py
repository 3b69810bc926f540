"""What ``load_state_dict(state_dict())`` of an optimizer carries, a save and a restore carry, or refuse by name."""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from stagereg.assembly import Checkpointer, Preemption
from stagereg.errors import CheckpointError, StageregError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


class Odd(torch.optim.Optimizer):
    """Has any state; beside it what it is given."""

    def __init__(self, groups: Any, beside: dict[str, Any] | None = None) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.beside = beside or {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.beside = {key: state_dict[key] for key in state_dict if key not in ("state", "param_groups")}


def shown(x: Any) -> Any:
    """All of a value that a resumed run could tell from another one."""
    if isinstance(x, DTensor):
        return "DTensor", str(x.placements), shown(x.full_tensor())
    if isinstance(x, Tensor):
        strides = x.stride() if x.numel() and not x.is_contiguous() else None
        data = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x
        return type(x).__name__, x.dtype, tuple(x.shape), strides, data.tolist()
    if isinstance(x, dict):
        return type(x).__name__, sorted(((repr(key), shown(item)) for key, item in x.items()), key=lambda one: one[0])
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [shown(item) for item in x]
    if isinstance(x, (set, frozenset)):
        return type(x).__name__, sorted(map(repr, x))
    return type(x).__name__, repr(x)


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """All that an optimizer has, as it has it."""
    each = [optimizer.state.get(x, {}) for group in optimizer.param_groups for x in group["params"]]
    own = {key: item for key, item in optimizer.state.items() if not isinstance(key, Tensor)}
    options = [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]
    return shown([each, own, options, getattr(optimizer, "beside", None)])


def save(root: Any, step: int = 1, **state: Any) -> None:
    with Checkpointer(str(root), stager=BlockingAsyncStager(), preemption=Preemption(None)) as keeper:
        keeper.save(step, state)


def restore(root: Any, **state: Any) -> dict[str, Any]:
    with Checkpointer(str(root), stager=BlockingAsyncStager(), preemption=Preemption(None)) as keeper:
        assert keeper.restore(state)
    return state


def error_of(root: str, **state: Any) -> str:
    try:
        save(root, **state)
    except StageregError as error:
        return str(error)
    return ""


# -- any state


@st.composite
def tensors(draw: Any) -> Tensor:
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 3), (3, 3), (2, 3, 2), (2, 0)]))
    x = torch.arange(math.prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    if x.dtype.is_floating_point:
        x = x / 3 + draw(st.sampled_from([0.0, math.nan]))
    return x.transpose(0, -1) if x.ndim > 1 and draw(st.booleans()) else x


SETS = st.one_of(st.sets(st.text("ab", max_size=2)), st.frozensets(st.tuples(st.text("ab", max_size=2))))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text("ab.w", max_size=3), st.binary(max_size=2), SETS
)
KEYS = st.one_of(st.text("ab", min_size=1, max_size=2), st.integers(3, 9), st.tuples(st.integers(0, 1), st.just("k")))
NESTED = st.recursive(
    st.one_of(tensors(), PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(["step", "exp_avg", "w", "state", "master", "a.b"])
ODD = st.fixed_dictionaries(
    {
        "dtypes": st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.complex64])] * 2),
        "states": st.tuples(*[st.one_of(st.dictionaries(NAMES, NESTED, max_size=3), tensors())] * 2),
        "own": st.dictionaries(st.one_of(KEYS, st.sampled_from(["v", "w", "state"])), NESTED, max_size=3),
        "beside": st.dictionaries(
            st.sampled_from(["count", "w", "aliases", "optimizers", "tensors"]), NESTED, max_size=2
        ),
        "groups": st.lists(st.booleans(), max_size=2),
        "in_module": st.booleans(),
        "had": st.booleans(),
    }
)


def built(odd: dict[str, Any], rate: float) -> tuple[torch.nn.Module, Odd]:
    model = torch.nn.Module()
    for name, dtype in zip("vw", odd["dtypes"], strict=True):
        model.register_parameter(name, torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)))
    groups: list[Any] = [{"params": [model.v]}, {"params": [model.w], "lr": rate / 2}]
    for before in odd["groups"]:
        groups.insert(0 if before else len(groups), {"params": [], "lr": rate / (3 + len(groups))})
    return model, Odd(groups)


def filled(odd: dict[str, Any], rate: float = 0.7) -> tuple[torch.nn.Module, Odd]:
    model, optimizer = built(odd, rate)
    for param, state in zip((model.v, model.w), odd["states"], strict=True):
        optimizer.state[param] = copy.deepcopy(state)
    optimizer.state.update(copy.deepcopy(odd["own"]))
    optimizer.beside = copy.deepcopy(odd["beside"])
    return model, optimizer


@settings(max_examples=40, deadline=None)
@given(ODD)
def test_any_state_comes_back_as_it_was_or_is_refused_by_name_when_it_is_saved(odd: dict[str, Any]) -> None:
    model, optimizer = filled(odd)
    before = state_of(optimizer)
    named = {"model": model} if odd["in_module"] else {}
    with tempfile.TemporaryDirectory() as root:
        if refusal := error_of(root, optimizer=optimizer, **named):
            assert "optimizer" in refusal
            return
        model, fresh = filled(odd, 0.3) if odd["had"] else built(odd, 0.3)
        restore(root, optimizer=fresh, **({"model": model} if named else {}))
    assert state_of(fresh) == before


# -- one process


def nets(*seeds: int) -> list[torch.nn.Linear]:
    made = []
    for seed in seeds:
        torch.manual_seed(seed)
        made.append(torch.nn.Linear(3, 2))
    return made


def test_state_that_torchs_state_dict_would_mix_up_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    [model] = nets(1)
    optimizer = Odd(model.parameters())
    for key in (1, True, 1.0):
        optimizer.state[key] = {"n": 3}
        with pytest.raises(CheckpointError, match=f"'optimizer': it has state under the key {key}, which torch takes"):
            save(tmp_path, model=model, optimizer=optimizer)
        del optimizer.state[key]
    old = torch.zeros(4, 5)
    optimizer.state[old] = {"n": 3}
    with pytest.raises(CheckpointError, match=r"1 tensor in none of its .* of shape \[4, 5\].*state\.pop\(old\)"):
        save(tmp_path, model=model, optimizer=optimizer)
    optimizer.state.pop(old)  # as the message says
    save(tmp_path, model=model, optimizer=optimizer)


def test_several_optimizers_keep_what_is_of_no_parameter_apart(tmp_path: Path) -> None:
    def state(*seeds: int) -> dict[str, Any]:
        stages = torch.nn.ModuleList(nets(*seeds))
        return {"model": stages, "optimizer": [Odd(stage.parameters()) for stage in stages]}

    saved, again = state(1, 2), state(3, 4)
    for number, each in enumerate(saved["optimizer"]):
        each.state["global"] = {"n": number, "x": torch.full((2,), float(number))}
        each.beside = {"count": number}
    save(tmp_path, **saved)
    restore(tmp_path, **again)
    assert list(map(state_of, again["optimizer"])) == list(map(state_of, saved["optimizer"]))
    model = torch.nn.ModuleList(nets(5, 6))
    with pytest.raises(CheckpointError, match="saved different values of 'global', which belongs to no parameter"):
        restore(tmp_path, model=model, optimizer=Odd(model.parameters()))
    whole = Odd(model.parameters())
    whole.state["global"] = {"x": torch.ones(2)}
    save(tmp_path / "whole", model=model, optimizer=whole)
    restore(tmp_path / "whole", **again)
    one, other = (each.state["global"]["x"] for each in again["optimizer"])
    assert one.data_ptr() != other.data_ptr(), "one tensor for two optimizers"
    assert shown(one) == shown(other) == shown(torch.ones(2))


def test_the_options_of_empty_groups_are_matched_by_position_or_refused(tmp_path: Path, caplog: Any) -> None:
    model, other = nets(1, 2)

    def groups(module: torch.nn.Module, *rates: float) -> Odd:
        return Odd([{"params": [*module.parameters()]}, *({"params": [], "lr": rate} for rate in rates)])

    save(tmp_path, model=model, optimizer=groups(model, 0.5, 0.25))
    same, fewer, none = groups(other, 1.0, 1.0), groups(other, 1.0), groups(other)
    restore(tmp_path, model=other, optimizer=same)
    assert [group["lr"] for group in same.param_groups] == [0.1, 0.5, 0.25]
    with pytest.raises(CheckpointError, match="it has 2 groups without parameters, which do not match the 1 here"):
        restore(tmp_path, model=other, optimizer=fewer)
    caplog.set_level(logging.WARNING)
    restore(tmp_path, model=other, optimizer=none)
    assert (
        "2 groups without parameters were saved, and the optimizer has 0. The saved options are ignored." in caplog.text
    )


def test_state_keeps_its_dtype_unless_the_parameter_has_another_one(tmp_path: Path) -> None:
    kinds = [torch.bfloat16, torch.bfloat16, torch.float64]
    model, same, wider = (net.to(dtype) for net, dtype in zip(nets(1, 2, 3), kinds, strict=True))
    optimizer = Odd(model.parameters())
    optimizer.state[model.weight] = {"master": model.weight.float() / 3, "near": [torch.ones(2, dtype=torch.uint8)]}
    save(tmp_path, optimizer=optimizer)
    for module, dtypes in ((same, [torch.float32, torch.uint8]), (wider, [torch.float64] * 2)):
        fresh = Odd(module.parameters())
        restore(tmp_path, optimizer=fresh)
        found = fresh.state[module.weight]
        assert [found["master"].dtype, found["near"][0].dtype] == dtypes
        assert torch.equal(found["master"].float(), optimizer.state[model.weight]["master"])


def test_several_optimizers_in_one_entry_keep_the_dtypes_of_each(tmp_path: Path) -> None:
    saved, fresh = ([net.bfloat16() for net in nets(*seeds)] for seeds in ((1, 2), (3, 4)))
    pairs = [[Odd([net.weight]) for net in each] for each in (saved, fresh)]
    for i, (net, optimizer) in enumerate(zip(saved, pairs[0], strict=True)):
        optimizer.state[net.weight] = {"master": net.weight.float() / (3 + i)}
    save(tmp_path, models=torch.nn.ModuleList(saved), optimizer=pairs[0])
    restore(tmp_path, models=torch.nn.ModuleList(fresh), optimizer=pairs[1])
    for old, new, before, after in zip(saved, fresh, *pairs, strict=True):
        found, wanted = after.state[new.weight]["master"], before.state[old.weight]["master"]
        assert found.dtype is torch.float32
        assert torch.equal(found, wanted)


def test_what_a_program_has_more_of_than_was_saved_is_named(tmp_path: Path, caplog: Any) -> None:
    model, other = nets(1, 2)
    save(tmp_path, model=model, optimizer=Odd(model.parameters()))
    fresh = Odd(other.parameters(), {"count": 3})
    restore(tmp_path, model=other, optimizer=fresh)
    assert fresh.beside == {"count": 3}
    assert "'count' of the optimizer was not saved, and keeps its current value." in caplog.text


def test_a_state_dict_as_torch_has_it_carries_as_much(tmp_path: Path) -> None:
    model, other = nets(1, 2)
    optimizer, fresh = Odd([{"params": [*model.parameters()]}, {"params": [], "lr": 0.5}]), None
    optimizer.state["global"], optimizer.beside = {"n": 3}, {"count": 4}
    optimizer.state[model.weight] = {"x": torch.ones(2)}
    save(tmp_path / "dict", optimizer=optimizer.state_dict())
    fresh = Odd([{"params": [*other.parameters()]}, {"params": []}])
    restore(tmp_path / "dict", optimizer=fresh)
    assert state_of(fresh) == state_of(optimizer)


class Own(torch.optim.SGD):
    """Has a state dict of its own kind."""

    kind: Any = None

    def state_dict(self) -> Any:
        return copy.deepcopy(self.kind)

    def load_state_dict(self, state_dict: Any) -> None:
        self.kind = state_dict


@pytest.mark.parametrize(
    "kind",
    [None, (1, torch.ones(2)), [{"state": {}, "param_groups": []}], [torch.ones(2)], torch.ones(3), {"n": 3}, "text"],
    ids=str,
)
def test_a_state_dict_of_any_kind_goes_back_into_its_optimizer(tmp_path: Path, kind: Any) -> None:
    [saved], [restored] = nets(1), nets(2)
    before, after = Own(saved.parameters(), lr=0.1), Own(restored.parameters(), lr=0.1)
    before.kind = kind
    save(tmp_path, model=saved, optimizer=before)
    restore(tmp_path, model=restored, optimizer=after)
    assert shown(after.kind) == shown(kind)


def test_a_state_dict_that_would_be_taken_for_one_by_name_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    [model] = nets(1)
    optimizer = Own(model.parameters(), lr=0.1)
    optimizer.kind = {"state": {}, "param_groups": {"weight": {"params": ["weight"]}}}
    with pytest.raises(CheckpointError, match=r"'optimizer': its state_dict\(\) has dicts .* 'param_groups' a list"):
        save(tmp_path, model=model, optimizer=optimizer)
    optimizer.kind["param_groups"] = [*optimizer.kind["param_groups"].values()]  # as the message says
    save(tmp_path, model=model, optimizer=optimizer)
    expected, optimizer.kind = optimizer.kind, None
    restore(tmp_path, model=model, optimizer=optimizer)
    assert optimizer.kind == expected


def test_options_whose_names_are_no_text_come_back(tmp_path: Path) -> None:
    [saved], [restored] = nets(1), nets(2)
    before, after = Odd([{"params": saved.parameters(), 1: "one"}]), Odd([{"params": restored.parameters(), 1: "two"}])
    save(tmp_path, model=saved, optimizer=before)
    restore(tmp_path, model=restored, optimizer=after)
    assert after.param_groups[0][1] == "one"
    groups = [{"params": [restored.weight], 1: "two"}, {"params": [restored.bias], 1: "one"}]
    save(tmp_path, 2, model=restored, optimizer=Odd(groups))
    with pytest.raises(CheckpointError, match="saved in several with different 1; create the same groups"):
        restore(tmp_path, model=saved, optimizer=before)
    other = torch.optim.SGD(saved.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="another kind of optimizer than SGD: it has 1; SGD has dampening"):
        restore(tmp_path, model=saved, optimizer=other)


# -- several ranks


def on_ranks(rank: int, size: int, root: str) -> dict[str, Any]:
    """Save and restore odd states on two ranks; return what is to be asserted."""
    found: dict[str, Any] = {}
    [model, other] = nets(1, 2)

    def back(name: str, kind: Any, fill: Any, shard: bool = False) -> None:
        pair = [copy.deepcopy(each) for each in (model, other)]
        pair = [fully_shard(each) for each in pair] if shard else pair
        one, two = (kind(each.parameters()) for each in pair)
        fill(pair[0], getattr(one, "optim", one))
        save(f"{root}/{name}", model=pair[0], optimizer=one)
        restore(f"{root}/{name}", model=pair[1], optimizer=two)
        before, after = (state_of(getattr(each, "optim", each)) for each in (one, two))
        found[name] = before == after

    def floats(module: Any, optimizer: Any) -> None:
        optimizer.state[module.weight] = {"prev_loss": 0.5 + rank, "al": [0.1, 0.2 * rank], "n": 4, "as": "text"}
        optimizer.state["global"] = {"loss": float(rank)}
        optimizer.beside = {"best": math.inf if rank else 1.0}

    def kinds(module: Any, optimizer: Any) -> None:
        sharded = module.weight
        moments = torch.ones_like(sharded) / 3
        whole = distribute_tensor(torch.ones(2, 3), sharded.device_mesh, [Replicate()])
        square = torch.arange(4.0).view(2, 2)
        state = {"exp_avg": moments, "same": torch.ones(2, 3), "square": square.t(), "row": [square[0], whole]}
        narrow = torch.full((2, 3), 0.1, dtype=torch.float64)
        optimizer.state[sharded] = {**state, "step": torch.tensor(3.0), "tuple": (square, 1), "wide": narrow}
        optimizer.state["own"] = {"q": square.t().clone(memory_format=torch.preserve_format)}

    def large(module: Any, optimizer: Any) -> None:
        optimizer.state[module.weight] = {"Q": torch.arange(65536.0).view(256, 256).t()}

    def local(module: Any, optimizer: Any) -> None:
        optimizer.state["global"] = {"rank": rank, "x": torch.full((2,), float(rank))}
        for group in optimizer.param_groups:
            for x in group["params"]:
                optimizer.state[x] = {"m": x.detach() / 3}

    back("floats", Odd, floats)
    back("kinds", Odd, kinds, shard=True)
    back("zero", lambda params: ZeroRedundancyOptimizer([*params], Odd), local)
    one, two = Odd(model.parameters()), Odd(other.parameters())
    large(model, one)
    with Checkpointer(f"{root}/large", stager=BlockingAsyncStager(), preemption=Preemption(None)) as keeper:
        for step in (1, 2, 3):  # each rank a share of it, in the later ones
            keeper.save(step, {"model": model, "optimizer": one})
            keeper.wait()
        keeper.restore({"model": other, "optimizer": two})
    found["large"] = state_of(two) == state_of(one)
    for name, value in {"counter": rank, "step": float(rank)}.items():
        optimizer = Odd(model.parameters())
        optimizer.state[model.weight] = {name if name != "counter" else "n": value}
        found[name] = error_of(f"{root}/{name}", model=model, optimizer=optimizer)
        optimizer = Odd(model.parameters())
        optimizer.state["global"] = {name: value}
        found[f"own {name}"] = error_of(f"{root}/own-{name}", model=model, optimizer=optimizer)
    optimizer = Odd([{"params": [*model.parameters()]}, {"params": [], "lr": 0.1 + rank}])
    found["rate"] = error_of(f"{root}/rate", model=model, optimizer=optimizer)
    flat = FullyShardedDataParallel(copy.deepcopy(model), use_orig_params=True, device_id=torch.device("cpu"))
    adam = torch.optim.AdamW([{"params": [*flat.parameters()]}, {"params": [], "lr": 0.5}])
    flat(torch.ones(1, 3)).sum().backward()
    adam.step()
    save(f"{root}/flat", model=flat, optimizer=adam)
    adam.param_groups[1]["lr"] = adam.param_groups[0]["lr"] = 1.0
    restore(f"{root}/flat", model=flat, optimizer=adam)
    found["flat"] = [group["lr"] for group in adam.param_groups] == [0.001, 0.5] and "betas" in adam.param_groups[1]
    adam.add_param_group({"params": []})
    found["flat groups"] = error_of(f"{root}/flat3", model=flat, optimizer=adam)
    adam.state["global"] = {"n": 1}
    found["flat own"] = error_of(f"{root}/flat2", model=flat, optimizer=adam)
    return found


def test_ranks_get_their_own_numbers_and_kinds_of_tensors_or_a_refusal_by_name(tmp_path: Path) -> None:
    found = run_ranks(on_ranks, 2, args=(str(tmp_path),), timeout_s=100)
    assert found[0] == found[1]
    texts = {name: text for name, text in found[0].items() if isinstance(text, str)}
    assert [name for name, right in found[0].items() if right is False] == []
    for name, path in {
        "counter": "'optimizer.state.weight.n' is not the same on all ranks",
        "step": "'optimizer.state.weight.step' is not the same on all ranks",
        "own counter": "'optimizer.optimizers.weight.state.global.counter' is not the same on all ranks",
        "own step": "'optimizer.optimizers.weight.state.global.step' is not the same on all ranks",
        "rate": "'optimizer.optimizers.weight.empty_groups.1.lr' is not the same on all ranks",
        "flat groups": "FSDP1 would not restore several groups without parameters of AdamW",
        "flat own": "FSDP1 would not restore 'global', several",
    }.items():
        assert path in texts[name]
    model = torch.nn.Linear(3, 2)
    alone = Odd(model.parameters())
    restore(tmp_path / "kinds", model=model, optimizer=alone)  # which one process has as a whole
    state = alone.state[model.weight]
    assert {key: type(x) for key, x in state.items() if isinstance(x, Tensor)} == dict.fromkeys(
        ("exp_avg", "same", "square", "step", "wide"), Tensor
    )
    assert shown(state["exp_avg"]) == shown(torch.ones(2, 3) / 3)
    assert state["wide"].dtype is torch.float64
    restore(tmp_path / "floats", model=model, optimizer=(one := Odd(model.parameters())))
    assert one.state[model.weight] == {"prev_loss": 0.5, "al": [0.1, 0.0], "n": 4, "as": "text"}
