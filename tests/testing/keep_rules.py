"""Retention rules: one that keeps the contract, and some that break one promise each."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.keep import Keep
from stagereg.testing import KeepContract

Rule = Callable[[list[Checkpoint], Mapping[str, Mapping[str, float]]], Any]


class Policy(KeepContract):
    def make(self) -> Keep:
        return Keep(newest=2, every=20, best=2, metric="loss")


class Rated(KeepContract):
    """The contract of a function, which ranks find by the name of its class."""

    timeout_s = 2.0
    decides: Rule

    def make(self) -> Rated:
        return type(self)()

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> Any:
        return type(self).decides(checkpoints, metrics)


def _newest(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "newest" for each in checkpoints[:2]}


def _powers_alone(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "power" for each in checkpoints if each.manifest.step.bit_count() == 1}


def _greatest_steps(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "greatest" for each in sorted(checkpoints, key=lambda one: -one.manifest.step)[:2]}


def _names(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return _newest(checkpoints) | {each.name: "newest" for each in checkpoints[:1]}


def _no_reasons(checkpoints: list[Checkpoint], *_: Any) -> dict[str, Any]:
    return {each.path: None for each in checkpoints}


def _a_list(checkpoints: list[Checkpoint], *_: Any) -> list[str]:
    return [each.path for each in checkpoints]


def _has_a_first_one(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {checkpoints[0].path: "newest"}


def _not_of_step_0(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "trained" for each in checkpoints if each.manifest.step}


def _needs_metrics(checkpoints: list[Checkpoint], metrics: Any) -> dict[str, str]:
    best = min(checkpoints, key=lambda each: metrics[each.path]["loss"])
    return _newest(checkpoints) | {best.path: "best"}


def _rounds_metrics(checkpoints: list[Checkpoint], metrics: Any) -> dict[str, str]:
    return {each.path: f"{round(metrics[each.path].get('loss', 0))}" for each in checkpoints}


def _at_random(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "luck" for i, each in enumerate(checkpoints) if i == 0 or random.random() < 0.5}


def _goes_by_the_order_of_metrics(checkpoints: list[Checkpoint], metrics: Any) -> dict[str, str]:
    return _newest(checkpoints) | dict.fromkeys(list(metrics)[:1], "first")


_calls = itertools.count()


def _every_other_call(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "turn" for each in checkpoints[: 1 + next(_calls) % 2]}


def _sorts_in_place(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    newest = checkpoints[0].path
    checkpoints.reverse()
    return {newest: "newest"}


def _pops_metrics(checkpoints: list[Checkpoint], metrics: Any) -> dict[str, str]:
    for each in checkpoints:
        metrics[each.path].pop("loss", 0.0)
    return _newest(checkpoints)


def _deletes(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    for each in checkpoints[2:]:
        shutil.rmtree(each.path, ignore_errors=True)
    return _newest(checkpoints)


def _opens(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    return {each.path: "small" for each in checkpoints if each.path.startswith("/") or Path(each.path).stat()}


def _hangs(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    if len(checkpoints) > 100:
        threading.Event().wait()
    return _newest(checkpoints)


def _waits_for_all_ranks(checkpoints: list[Checkpoint], *_: Any) -> dict[str, str]:
    if dist.is_initialized():
        dist.barrier()
    return _newest(checkpoints)


def of(decides: Rule) -> type[Rated]:
    name = f"Of{decides.__name__}"
    globals()[name] = contract = type(name, (Rated,), {"decides": staticmethod(decides), "__module__": __name__})
    return contract


RIGHT = [Policy]
_BREAKS = {
    "test_newest_is_retained": [_powers_alone, _greatest_steps, _a_list],
    "test_paths_and_reasons": [_names, _no_reasons],
    "test_none_and_one": [_has_a_first_one, _not_of_step_0],
    "test_any_metrics": [_needs_metrics, _rounds_metrics],
    "test_same_answer_again": [_at_random, _goes_by_the_order_of_metrics, _every_other_call],
    "test_leaves_all_as_it_is": [_sorts_in_place, _pops_metrics, _deletes],
    "test_paths_are_only_names": [_opens],
    "test_many_checkpoints": [_hangs],
    "test_rank_0_alone": [_waits_for_all_ranks],
}
WRONG = [(promise, of(rule)) for promise, rules in _BREAKS.items() for rule in rules]
