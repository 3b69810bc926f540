"""Joinables and their hooks are chosen in a config; a wrong config is an error of a few lines with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.config.suggestions import explain
from stagereg.errors import ConfigError, JoinError
from stagereg.join.kinds.ddp import DdpHook, DdpJoinable
from stagereg.join.kinds.module import ModuleJoinable
from stagereg.join.kinds.step import StepJoinable
from stagereg.registry import find
from stagereg.testing import run_ranks

from ..support.reference import JOINABLES

APP = """
defaults:
  - stagereg
  - joinable@join.joinables.model: ddp
  - join_hook@join.joinables.model.hook: null
  - _self_
"""


@stagereg.register("join_hook", "counting_ddp")
class CountingHook(DdpHook):
    """As ``ddp``, and counts the steps that its rank takes part in without data."""

    steps = 0

    def __init__(self, joinable: DdpJoinable, weight: int = 1) -> None:
        super().__init__(joinable)
        self.weight = weight

    def main_hook(self) -> None:
        super().main_hook()
        CountingHook.steps += self.weight


@stagereg.register("joinable", "own_step")
class OwnStep(StepJoinable):
    """A third party's joinable."""


@stagereg.register("join_hook", "told")
class ToldHook(stagereg.JoinHook):
    """The default hook of a third party's joinable, with options."""

    def __init__(self, joinable: Any, /, unit: str = "steps", times: int = 1) -> None:
        self.unit, self.times = unit, times


@stagereg.register("join_hook", "other")
class OtherHook(stagereg.JoinHook):
    """Another hook for the same joinable."""

    def __init__(self, joinable: Any, /, unit: str = "ticks") -> None:
        self.unit = unit


@stagereg.register("joinable", "told")
class Told(StepJoinable):
    """A joinable whose hook has options."""

    own_hook: Any = ToldHook


def composed(folder: Any, overrides: list[str], app: str = APP) -> Any:
    (folder / "app.yaml").write_text(app)
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("app", overrides)


def model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained(rank: int, world_size: int, cfg: Any) -> Any:
    """The weights, the steps of the configured hook, the mean of a configured metric, and the joinables."""
    CountingHook.steps = 0
    model, optimizer = model_and_optimizer()
    join = stagereg.instantiate(cfg, model=model, optimizer=optimizer)
    metrics = join.joinables.get("metrics")
    with join:
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + step)).sum().backward()
            optimizer.step()
            if metrics is not None:
                metrics.add(step=(float(step), 1))
    mean = metrics.compute() if metrics is not None else {}
    return (
        model.module.weight.detach(),
        CountingHook.steps,
        mean,
        {n: type(j).__name__ for n, j in join.joinables.items()},
    )


def all_trained(rank: int, world_size: int, cfgs: dict[str, Any]) -> dict[str, Any]:
    return {name: trained(rank, world_size, cfg) for name, cfg in cfgs.items()}


def test_configured_joinables_and_hooks_are_those_that_run(tmp_path: Path) -> None:
    """A joinable is bound to its object by name, a hook replaces its joinable's own, and another's joinable ours."""
    chosen = {
        "plain": [],
        **({"metrics": ["+joinable@join.joinables.metrics=metrics"]} if JOINABLES else {}),
        "hook": ["join_hook@join.joinables.model.hook=counting_ddp", "join.joinables.model.hook.weight=3"],
        "own": ["+joinable@join.joinables.optimizer=own_step"],
    }
    cfgs = {name: composed(tmp_path, overrides).join for name, overrides in chosen.items()}
    first, second = run_ranks(all_trained, 2, args=(cfgs,), timeout_s=60)
    for name in chosen:
        assert torch.equal(first[name][0], second[name][0])
        assert torch.equal(first[name][0], first["plain"][0])
        assert (first[name][1], second[name][1]) == ((6, 0) if name == "hook" else (0, 0))
        kinds = {"model": "DdpJoinable", "optimizer": "OwnStep" if name == "own" else "StepJoinable"}
        more = {"metrics": "MetricsJoinable"} if name == "metrics" else {}
        assert first[name][3] == second[name][3] == kinds | more
    if JOINABLES:
        assert first["metrics"][2] == second["metrics"][2] == {"step": (0 + 0 + 1 + 2) / 4}


def refusals(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, str]:
    model, optimizer = model_and_optimizer()
    objects = {"model": model, "optimizer": optimizer, "optimizr": optimizer, "modle": model, "number": 3}
    errors = {}
    for name, (cfg, names) in cases.items():
        with pytest.raises((JoinError, ConfigError)) as error:
            stagereg.instantiate(cfg, **{each: objects[each] for each in names}).__enter__()
        errors[name] = str(error.value)
    return errors


WRONG: dict[str, tuple[list[str], list[str], tuple[str, ...]]] = {
    "no object": ([], ["optimizer"], ("join.joinables.model cannot be made", "model=...", "Passed: optimizer")),
    "a misspelt name": ([], ["modle", "optimizer"], ("join.joinables.model cannot be made", "Did you mean 'modle'?")),
    "null": (["join.joinables.model=null"], ["model"], ("join.joinables.model is null",)),
    "no joinable for it": ([], ["model", "number"], ("no joinable 'number'", "a int cannot take part")),
    "no hook at all": (
        ["+stager@join.joinables.model.hook=blocking"],
        ["model"],
        ("join.joinables.model.hook takes a join_hook, not stager/blocking",),
    ),
}
if JOINABLES:
    WRONG["another object"] = (
        ["joinable@join.joinables.model=fsdp2"],
        ["model"],
        ("the fsdp2 joinable needs an FSDP2 module",),
    )
    WRONG["no object for one more"] = (
        ["+joinable@join.joinables.shards=zero"],
        ["model"],
        ("join.joinables.shards cannot be made", "'optimizer'"),
    )


def test_a_joinable_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    cases = {name: (composed(tmp_path, overrides).join, names) for name, (overrides, names, _) in WRONG.items()}
    (errors,) = run_ranks(refusals, 1, args=(cases,), timeout_s=40)
    for name, (_, _, parts) in WRONG.items():
        assert all(each in errors[name] for each in parts), errors[name]
        assert len(errors[name]) < 400


ADDED = "+joinable@join.joinables.last=told"
HOOK = "join.joinables.last.hook"


@pytest.mark.parametrize(
    ("overrides", "hook"),
    [
        ([], (ToldHook, {"unit": "steps", "times": 1})),
        ([f"{HOOK}.unit=batches"], (ToldHook, {"unit": "batches", "times": 1})),
        ([f"{HOOK}.times=3"], (ToldHook, {"unit": "steps", "times": 3})),
        ([f"+join_hook@{HOOK}=other"], (OtherHook, {"unit": "ticks"})),
        ([f"+join_hook@{HOOK}=other", f"{HOOK}.unit=batches"], (OtherHook, {"unit": "batches"})),
        ([f"{HOOK}=null"], (ToldHook, {"unit": "steps", "times": 1})),
    ],
)
def test_options_of_a_default_hook_are_set_without_choosing_it(tmp_path: Path, overrides: list[str], hook: Any) -> None:
    cfg = composed(tmp_path, [ADDED, *overrides]).join.joinables.last
    for make in (stagereg.instantiate, *([] if hook[0] is OtherHook else [instantiate])):
        made = make(cfg, step=print).join_hook()
        assert (type(made), vars(made)) == hook


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([ADDED, f"{HOOK}.unti=x"], "join_hook/told takes no 'unti'. Did you mean 'unit'? It takes: unit, times"),
        (
            ["+joinable@join.joinables.last=step", f"{HOOK}.unit=x"],
            f"{HOOK} has no options before a join_hook is selected. Write +join_hook@{HOOK}=NAME {HOOK}.unit=x, with",
        ),
    ],
)
def test_an_option_that_no_default_hook_has_is_refused_with_what_to_write(
    tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises(HydraException) as error, mock.patch("sys.argv", ["app.py", *overrides]):
        composed(tmp_path, overrides)
    with mock.patch("sys.argv", ["app.py", *overrides]):
        assert explain(error.value).startswith(text)
    cfg = composed(tmp_path, ["+joinable@join.joinables.last=told", f"+join_hook@{HOOK}=told", f"{HOOK}.unit=x"])
    assert cfg.join.joinables.last.hook.unit == "x"


def test_a_hook_option_of_another_type_is_refused(tmp_path: Path) -> None:
    cfg = composed(tmp_path, [ADDED, f"{HOOK}.times=x"]).join.joinables.last
    with pytest.raises(ConfigError, match=r"join\.joinables\.last\.hook\.times: 'x' is not a whole number"):
        stagereg.instantiate(cfg, step=print)


def test_a_joinable_without_a_hook_is_refused() -> None:
    joinable = Told(print)
    joinable.own_hook = None
    with pytest.raises(JoinError, match=r"a Told has no hook\. Set own_hook, or pass a default to make_hook"):
        joinable.make_hook()


def bare(rank: int, world_size: int, cfg: Any) -> list[list[str]]:
    model, optimizer = model_and_optimizer()
    joins = [
        stagereg.instantiate(cfg, [model, optimizer]),
        stagereg.instantiate(cfg, model=model, optimizer=optimizer),
        stagereg.Join({"net": model, "other": StepJoinable(optimizer.step)}),
    ]
    return [list(join.joinables) for join in joins]


def test_without_configured_joinables_bare_objects_are_adapted(tmp_path: Path) -> None:
    cfg = composed(tmp_path, [], "defaults: [stagereg, _self_]").join
    assert run_ranks(bare, 1, args=(cfg,), timeout_s=40) == [[["0", "1"], ["model", "optimizer"], ["net", "other"]]]


@pytest.mark.parametrize("name", ["ddp", "module", "step", *(["fsdp2", "metrics", "zero"] if JOINABLES else [])])
def test_every_hook_refuses_a_joinable_of_another_kind(name: str) -> None:
    hook = find("join_hook", name).load()
    other: Any = StepJoinable(lambda: None) if name == "module" else ModuleJoinable(nn.Linear(1, 1))
    with pytest.raises(JoinError, match=f"was chosen for a {type(other).__name__}, which it does not support"):
        hook(other)
