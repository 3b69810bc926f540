"""A refused restore changes nothing, or says what has changed; modules take what torch's ``load_state_dict`` takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.data import ResumableSampler
from stagereg.errors import CheckpointError

from ...support.installed import needs
from ..state.test_nested import Counting, refused, restore, save


class Recorder(torch.nn.Linear):
    """Has extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


EXTRA = [
    (torch.arange(5.0), torch.empty(0)),
    (torch.arange(5.0), torch.arange(5)),
    (torch.tensor([1, 2], dtype=torch.uint8), torch.zeros(2)),
    (torch.arange(3.0), {"history": []}),
    ([1, 2], torch.zeros(2)),
    (None, torch.zeros(2)),
]


@pytest.mark.parametrize(("saved", "here"), EXTRA)
def test_extra_state_is_given_to_the_module_as_it_was_saved(saved: Any, here: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(Recorder(saved)), Recorder(saved))
    mine = torch.nn.Sequential(torch.nn.Sequential(Recorder(here)), Recorder(here))
    before = here.clone() if isinstance(here, torch.Tensor) else here
    save(tmp_path, {"model": model})
    restore(tmp_path, {"model": mine})
    for each in mine[0][0], mine[1]:
        assert equal(each.extra, saved)
    assert equal(here, before)  # never read into what get_extra_state returned


def test_tensors_in_extra_state_are_not_overwritten_where_they_are(tmp_path: Path) -> None:
    save(tmp_path, {"model": Recorder({"scale": torch.ones(2)})})
    mine = {"scale": torch.zeros(2)}
    model = Recorder(mine)
    restore(tmp_path, {"model": model})
    assert torch.equal(model.extra["scale"], torch.ones(2))
    assert torch.equal(mine["scale"], torch.zeros(2))


class Setting(torch.nn.Linear):
    """Takes extra state, and has none itself."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = None

    set_extra_state = Recorder.set_extra_state


class Getting(torch.nn.Linear):
    """Has extra state, and does not take it."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> Any:
        return torch.ones(1)


def extra() -> torch.nn.Module:
    return Recorder(torch.ones(3))


@pytest.mark.parametrize("saved", [lambda: torch.nn.Linear(2, 2), extra, Getting])
@pytest.mark.parametrize("here", [lambda: torch.nn.Linear(2, 2), extra, Getting, Setting])
def test_extra_state_of_one_side_alone_is_as_with_torch(
    saved: Callable[[], torch.nn.Module], here: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    model, mine = saved(), here()
    try:
        here().load_state_dict(model.state_dict())
        takes = True
    except RuntimeError:
        takes = False
    save(tmp_path, {"model": model})
    if takes:
        restore(tmp_path, {"model": mine})
        assert torch.equal(mine.weight, model.weight)
        assert not isinstance(mine, Setting | Recorder) or equal(mine.extra, model.get_extra_state())
    else:
        assert "_extra_state" in refused(lambda: restore(tmp_path, {"model": mine}))


# -- lazy modules

LAZY: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: torch.nn.LazyLinear(3), (2, 4)),
    "batch norm": (torch.nn.LazyBatchNorm1d, (2, 4)),
    "conv": (lambda: torch.nn.LazyConv2d(2, 1), (1, 3, 4, 4)),
    "several": (lambda: torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2)), (2, 4)),
}


def state_of(make: Callable[[], torch.nn.Module], optimizer_first: bool) -> dict[str, Any]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"optimizer": optimizer, "model": model}
    return state if optimizer_first else {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_lazy_module_gets_its_shapes_from_the_checkpoint(kind: str, optimizer_first: bool, tmp_path: Path) -> None:
    make, shape = LAZY[kind]
    saved, mine = state_of(make, False), state_of(make, optimizer_first)
    for _ in range(2):
        saved["model"](torch.rand(shape)).sum().backward()
        saved["optimizer"].step()
    save(tmp_path, saved)
    restore(tmp_path, mine)
    x = torch.rand(shape)
    for state in saved, mine:
        state["optimizer"].zero_grad()
        state["model"](x).sum().backward()
        state["optimizer"].step()
    for one, other in zip(saved["model"].state_dict().values(), mine["model"].state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_uninitialized_parameters_are_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.LazyBatchNorm1d())
    text = refused(lambda: save(tmp_path, {"nets": {"m": model}}))
    assert "'nets.m.0.weight' cannot be saved" in text
    model(torch.rand(2, 3))  # as the message says
    save(tmp_path, {"nets": {"m": model}})


# -- DataParallel


@pytest.mark.parametrize("wraps", [(True, False), (False, True), (True, True)])
def test_data_parallel_is_left_out_of_names(wraps: tuple[bool, bool], tmp_path: Path) -> None:
    def program(wrap: bool) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        wrapped = torch.nn.DataParallel(model) if wrap else model
        return {"model": wrapped, "optimizer": torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)}

    saved, mine = map(program, wraps)
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    save(tmp_path, saved)
    restore(tmp_path, mine)
    for one, other in zip(saved["model"].parameters(), mine["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(
            saved["optimizer"].state[one]["momentum_buffer"], mine["optimizer"].state[other]["momentum_buffer"]
        )


class Wrapper(torch.nn.Module):
    """Puts ``module.`` before names, as DataParallel did when its names were not left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_names_that_all_begin_with_module_are_those_without(tmp_path: Path) -> None:
    saved = Wrapper(torch.nn.Sequential(torch.nn.BatchNorm1d(2), Recorder(torch.ones(3))))
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.7)
    mine = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Recorder(torch.ones(1)))
    mine_too = torch.optim.SGD(mine.parameters(), lr=0.1)
    save(tmp_path, {"model": saved, "optimizer": optimizer})
    restore(tmp_path, {"model": mine, "optimizer": mine_too})
    assert torch.equal(mine[1].weight, saved.module[1].weight)
    assert torch.equal(mine[1].extra, torch.ones(3))
    assert mine_too.param_groups[0]["lr"] == 0.7


def test_the_names_of_both_sides_are_shown(tmp_path: Path) -> None:
    save(tmp_path, {"model": torch.nn.ModuleDict({"trunk": torch.nn.Linear(2, 2)})})
    text = refused(lambda: restore(tmp_path, {"model": torch.nn.Linear(2, 2)}))
    assert (
        "2 missing in the checkpoint: weight, bias; 2 in the checkpoint but not here: trunk.bias, trunk.weight" in text
    )


# -- what is refused


def net(value: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return model


def masked(value: float, mask: torch.Tensor) -> torch.nn.Module:
    model = net(value)
    model.register_buffer("mask", mask)
    return model


def inference_mask() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3, 4)


def scheduled(*counts: int) -> Any:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    each = [ConstantLR(optimizer, 0.5, 3) for _ in counts]
    return SequentialLR(optimizer, each, [*counts[1:]])


def functions(count: int) -> Any:
    groups = [{"params": [torch.ones(1)]} for _ in range(count)]
    return LambdaLR(torch.optim.SGD(groups, lr=0.1), [Scaling()] * count)


class Scaling:
    def __call__(self, step: int) -> float:
        return 1.0


class Picky(Counting):
    """Refuses what it gets."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = 100
        raise ValueError("no")


# of each kind: what is saved next to the model, what the program has in its place, and a part of the message
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "expanded buffer": (
        lambda: masked(7, torch.ones(3, 4)),
        lambda: masked(1, torch.ones(3, 1).expand(3, 4)),
        "'other.mask' has several elements at one address",
    ),
    "meta buffer": (
        lambda: masked(7, torch.ones(3)),
        lambda: masked(1, torch.ones(3, device="meta")),
        "'other.mask' is on the meta device",
    ),
    "inference buffer": (lambda: masked(7, torch.ones(3, 4)), lambda: masked(1, inference_mask()), "inference_mode"),
    "number for a tensor": (
        lambda: {"weight": torch.ones(2, 2), "bias": 3},
        lambda: net(),
        "bias (a int in the checkpoint, a tensor here)",
    ),
    "expanded tensor": (lambda: torch.ones(3, 4), lambda: torch.ones(3, 1).expand(3, 4), "several elements"),
    "scheduler of fewer": (lambda: scheduled(1, 2, 3), lambda: scheduled(1, 2), "_schedulers has 3 items"),
    "functions": (lambda: functions(3), lambda: functions(2), "lr_lambdas has 3 items"),
    "scheduler from a number": (lambda: 3, lambda: scheduled(1, 2), "not the state of a SequentialLR"),
    "optimizer from a number": (
        lambda: 3,
        lambda: torch.optim.SGD([torch.ones(1)], lr=0.1),
        "not the state of an optimizer",
    ),
    "scaler that was off": (
        lambda: torch.amp.GradScaler("cpu", enabled=False),
        lambda: torch.amp.GradScaler("cpu"),
        "disabled",
    ),
    "generator": (lambda: 3, torch.Generator, "not the state of a random number generator"),
    "sampler of other data": (
        lambda: ResumableSampler(range(4), 1, 0),
        lambda: ResumableSampler(range(5), 1, 0),
        "saved with length=4",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("read", ["each", pytest.param("once", marks=needs("buckets"))])
def test_a_refused_restore_changes_nothing(kind: str, read: Any, tmp_path: Path) -> None:
    make_saved, make_here, message = REFUSED[kind]
    model, seen = net(1.0), Counting(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved_model = net(7.0)
    saved = {"seen": Counting(7), "model": saved_model, "optimizer": torch.optim.SGD(saved_model.parameters(), lr=0.7)}
    save(tmp_path, {**saved, "n": [7], "other": make_saved()})
    numbers = [1]
    state = {"seen": seen, "model": model, "optimizer": optimizer, "n": numbers, "other": make_here()}
    before = torch.get_rng_state()
    text = refused(lambda: restore(tmp_path, state, restore=stagereg.Restore(read=read)))
    assert "'other'" in text
    assert message in text
    assert "have changed" not in text
    assert (seen.count, numbers, optimizer.param_groups[0]["lr"]) == (1, [1], 0.1)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_an_object_refuses_itself_is_said_to_have_changed_others(tmp_path: Path) -> None:
    save(tmp_path, {"seen": Counting(7), "picky": Counting(3), "model": net(7), "late": Counting(7)})
    state = {"seen": Counting(1), "picky": Picky(1), "model": net(1), "late": Counting(1)}
    text = refused(lambda: restore(tmp_path, state))
    assert "'picky' may have changed in part. Objects that were restored before it have changed: " in text
    changed = text.partition("have changed: ")[2].partition(".")[0].split(", ")
    weights = state["model"].weight
    assert ("model" in changed) == torch.equal(weights, torch.full((2, 2), 7.0))
    assert sorted(changed) == ["model", "seen"]
    assert state["late"].count == 1
    with (
        pytest.raises(
            CheckpointError, match="Do not train with them: restore another checkpoint, or start the program again"
        ),
        Checkpointer(tmp_path, every=1) as c,
    ):
        c.restore(state)
