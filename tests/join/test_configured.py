"""Joinables and their hooks are chosen in a config; a wrong config is an error of a few lines with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import ConfigError, JoinError
from stagereg.join.kinds.ddp import DdpHook, DdpJoinable
from stagereg.join.kinds.metrics import MetricsJoinable
from stagereg.join.kinds.step import StepJoinable
from stagereg.registry import find
from stagereg.testing import run_ranks

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


def test_a_configured_joinable_is_bound_to_its_object_and_reached_by_name(tmp_path: Any) -> None:
    cfg = composed(tmp_path, ["+joinable@join.joinables.metrics=metrics"]).join
    first, second = run_ranks(trained, 2, args=(cfg,), timeout_s=40)
    assert torch.equal(first[0], second[0])
    assert first[2] == second[2] == {"step": (0 + 0 + 1 + 2) / 4}
    assert first[3] == {"model": "DdpJoinable", "optimizer": "StepJoinable", "metrics": "MetricsJoinable"}


def test_a_configured_hook_replaces_the_joinables_own(tmp_path: Any) -> None:
    chosen = "join_hook@join.joinables.model.hook=counting_ddp"
    results = [
        run_ranks(trained, 2, args=(composed(tmp_path, overrides).join,), timeout_s=40)
        for overrides in ([], [chosen, "join.joinables.model.hook.weight=3"])
    ]
    (own, _), (other, active) = results
    assert torch.equal(own[0], other[0])
    assert (own[1], other[1], active[1]) == (0, 6, 0)


def test_a_joinable_of_another_package_replaces_a_built_in_one(tmp_path: Any) -> None:
    cfg = composed(tmp_path, ["+joinable@join.joinables.optimizer=own_step"]).join
    ranks = run_ranks(trained, 2, args=(cfg,), timeout_s=40)
    assert [rank[3]["optimizer"] for rank in ranks] == ["OwnStep"] * 2
    assert torch.equal(ranks[0][0], ranks[1][0])


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
    "no object": ([], ["optimizer"], ("join.joinables.model cannot be made", "model=...", "Given: optimizer")),
    "a misspelt name": ([], ["modle", "optimizer"], ("join.joinables.model cannot be made", "Did you mean 'modle'?")),
    "null": (["join.joinables.model=null"], ["model"], ("join.joinables.model is null",)),
    "no joinable for it": ([], ["model", "number"], ("no joinable 'number'", "a int cannot take part")),
    "a hook of another joinable": (
        ["join_hook@join.joinables.model.hook=metrics"],
        ["model", "optimizer"],
        ("a MetricsHook was chosen for a DdpJoinable", "of which it is no hook"),
    ),
    "no hook at all": (
        ["+stager@join.joinables.model.hook=blocking"],
        ["model"],
        ("join.joinables.model.hook takes a join_hook, not stager/blocking",),
    ),
    "another object": (
        ["joinable@join.joinables.model=fsdp2"],
        ["model"],
        ("the fsdp2 joinable needs a module to which torch.distributed.fsdp.fully_shard was applied",),
    ),
    "several objects": (
        ["+joinable@join.joinables.saver=checkpoint"],
        ["model"],
        ("join.joinables.saver cannot be made", "'checkpointer'"),
    ),
}


def test_a_joinable_that_cannot_be_bound_is_refused_in_a_few_lines_that_name_it(tmp_path: Any) -> None:
    cases = {name: (composed(tmp_path, overrides).join, names) for name, (overrides, names, _) in WRONG.items()}
    (errors,) = run_ranks(refusals, 1, args=(cases,), timeout_s=40)
    for name, (_, _, parts) in WRONG.items():
        assert all(each in errors[name] for each in parts), errors[name]
        assert len(errors[name]) < 400


def test_two_joinables_of_one_name_are_refused_by_hydra(tmp_path: Any) -> None:
    with pytest.raises(Exception, match=r"Multiple values for joinable@join\.joinables\.model"):
        composed(tmp_path, ["+joinable@join.joinables.model=fsdp2"])


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("joinable@join.joinables.model=ddq", "ddp"), ("join_hook@join.joinables.model.hook=metrcs", "metrics")],
)
def test_a_misspelt_option_is_refused_with_the_nearest(tmp_path: Any, override: str, nearest: str) -> None:
    with pytest.raises(Exception, match=f"Did you mean '{nearest}'"):
        composed(tmp_path, [override])


def bare(rank: int, world_size: int, cfg: Any) -> list[list[str]]:
    model, optimizer = model_and_optimizer()
    joins = [
        stagereg.instantiate(cfg, [model, optimizer]),
        stagereg.instantiate(cfg, model=model, optimizer=optimizer),
        stagereg.Join({"net": model, "metrics": MetricsJoinable()}),
    ]
    return [list(join.joinables) for join in joins]


def test_without_configured_joinables_bare_objects_are_adapted(tmp_path: Any) -> None:
    cfg = composed(tmp_path, [], "defaults: [stagereg, _self_]").join
    assert run_ranks(bare, 1, args=(cfg,), timeout_s=40) == [[["0", "1"], ["model", "optimizer"], ["net", "metrics"]]]


@pytest.mark.parametrize("name", ["checkpoint", "collective", "ddp", "fsdp2", "metrics", "module", "step", "zero"])
def test_every_hook_refuses_a_joinable_of_another_kind(name: str) -> None:
    hook = find("join_hook", name).load()
    other: Any = StepJoinable(lambda: None) if name == "metrics" else MetricsJoinable()
    with pytest.raises(JoinError, match=f"was chosen for a {type(other).__name__}"):
        hook(other)
