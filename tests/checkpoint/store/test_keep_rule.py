"""A rule of one's own decides what stays; one that fails deletes nothing, and the newest stays whatever it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.errors import ConfigError, RegistryError
from stagereg.testing.ranks import run_ranks
from tests.support.keeping import OfSteps, composed, listed, steps, train

Metrics = Mapping[str, Mapping[str, float]]


OF_STEPS = f"{OfSteps.__module__}.OfSteps"


class Does:
    """Does as a function does."""

    def __init__(self, function: Callable[[list[Checkpoint]], Any]) -> None:
        self.function = function

    def select(self, checkpoints: list[Checkpoint], metrics: Metrics) -> dict[str, str]:
        found: dict[str, str] = self.function(checkpoints)
        return found


def broken(checkpoints: list[Checkpoint]) -> Any:
    raise ValueError("of the rule")


FAILURES = {
    "ValueError: of the rule (": broken,
    "it returned None, which is not a mapping": lambda there: None,
    "it returned ['step-": lambda there: [Path(one.path).name for one in there],
    "it returned ('elsewhere', 'why'), which is not a checkpoint's path with a reason": lambda there: {
        "elsewhere": "why"
    },
    ", 3), which is not a checkpoint's path with a reason": lambda there: {one.path: 3 for one in there},
    "it selected no checkpoint": lambda there: {},
}


def test_a_rule_says_what_stays_and_ls_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), OfSteps([1, 3]), range(1, 6))
    assert steps(tmp_path) == [1, 3, 5]
    assert listed(str(tmp_path), capsys) == {5: "newest", 3: "of a step", 1: "of a step"}


@pytest.mark.parametrize(("said", "does"), FAILURES.items(), ids=["raise", "none", "list", "path", "no", "0"])
def test_a_rule_that_fails_deletes_nothing_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, does: Any
) -> None:
    train(str(tmp_path), Does(does), [1, 2, 3, 3])  # a step that is saved again is replaced all the same
    assert steps(tmp_path) == [1, 2, 3]
    assert len(list(tmp_path.glob("*step-*"))) == 3
    (warned,) = [each.getMessage() for each in caplog.records]
    assert warned.startswith(f"stagereg: Checkpointer(keep=...) failed, {__name__}.Does: ")
    assert said in warned


def test_a_rule_that_failed_once_is_followed_at_the_next_save(tmp_path: Path) -> None:
    calls = iter([broken, broken])
    rule = Does(lambda there: next(calls, lambda there: {there[0].path: "first"})(there))
    train(str(tmp_path), rule, [1, 2])
    assert steps(tmp_path) == [1, 2]
    train(str(tmp_path), rule, [3])
    assert steps(tmp_path) == [3]


def test_a_rule_cannot_change_what_there_is(tmp_path: Path) -> None:
    def takes_all(there: list[Checkpoint]) -> dict[str, str]:
        oldest = there.pop()
        there.clear()
        return {oldest.path: "oldest"}

    train(str(tmp_path), Does(takes_all), [1, 2, 3])
    assert steps(tmp_path) == [1, 3]


def test_a_subclass_of_the_policy_is_guarded_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stricter(Keep):
        def select(self, checkpoints: Iterable[Checkpoint], metrics: Metrics) -> dict[str, str]:
            raise KeyError("metric")

    train(str(tmp_path), Stricter(newest=1), [1, 2, 3])
    assert steps(tmp_path) == [1, 2, 3]
    (warned,) = [each.getMessage() for each in caplog.records]
    assert "Stricter: KeyError: 'metric'" in warned


@pytest.mark.parametrize(
    ("keep", "line"),
    [
        (OfSteps, "Checkpointer(keep=...) is a class. Call it: keep=OfSteps(...)"),
        (type("Bare", (), {"select": lambda self: {}})(), "def select(self, checkpoints, metrics) -> dict[str, str]"),
        (object(), "Checkpointer(keep=...) must be a whole number of at least 1"),
    ],
)
def test_what_is_no_rule_is_refused(tmp_path: Path, keep: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpointer(str(tmp_path), keep=keep)
    assert line in str(caught.value)


def test_a_class_without_the_method_is_refused_where_it_is_registered() -> None:
    with pytest.raises(RegistryError, match=r"def select\(self, checkpoints, metrics\)"):
        stagereg.register("keep", "none")(type("Nothing", (), {}))


def comparing(rank: int, size: int, root: str) -> str:
    Checkpointer(root, keep=OfSteps([rank])).close()  # one of rank 0 decides; its attributes are not compared
    keep: Keep | KeepRule = OfSteps([]) if rank else Keep(5)
    with pytest.raises(ConfigError) as caught:
        Checkpointer(root, keep=keep)
    return str(caught.value)


def test_ranks_with_another_kind_of_rule_all_raise(tmp_path: Path) -> None:
    line = f"Checkpointer(keep=...) is not the same on all ranks: rank 0 has Keep, rank 1 has {OF_STEPS}."
    assert all(line in text for text in run_ranks(comparing, nproc=2, args=(str(tmp_path),)))


# -- in a config


@pytest.mark.parametrize(
    ("overrides", "app"),
    [
        (["checkpoint/keep=of_steps", "checkpoint.keep.steps=[4]"], "defaults: [stagereg, _self_]"),
        ([], "defaults: [stagereg, override checkpoint/keep: of_steps, _self_]\ncheckpoint: {keep: {steps: [4]}}"),
        ([], f"defaults: [stagereg, _self_]\ncheckpoint: {{keep: {{_target_: {OF_STEPS}, steps: [4], every: 7}}}}"),
    ],
    ids=["command line", "chosen", "target"],
)
def test_a_config_chooses_a_rule(tmp_path: Path, overrides: list[str], app: str) -> None:
    for more, every in ([], 7), (["checkpoint.keep.every=null"], None):
        with stagereg.instantiate(composed(tmp_path, *overrides, *more, app=app).checkpoint) as checkpointer:
            rule = rule_of(checkpointer)
            assert type(rule) is OfSteps
            assert (rule.steps, rule.every) == ([4], every)


def rule_of(checkpointer: stagereg.Checkpointer) -> Any:
    return checkpointer._target.keep._rule


def test_a_rule_in_a_plain_mapping_has_its_own_defaults(tmp_path: Path) -> None:
    keep = {"_target_": OF_STEPS, "steps": [1]}
    plain = {"_target_": "stagereg.assembly.Checkpointer", "dir": str(tmp_path), "keep": keep}
    with stagereg.instantiate(plain) as checkpointer:
        assert rule_of(checkpointer).every == 7


def test_of_a_text_the_error_names_what_a_config_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        stagereg.instantiate(composed(tmp_path, "checkpoint.keep=abc").checkpoint)
    assert str(caught.value).splitlines() == [
        "checkpoint.keep: 'abc' is not a whole number.",
        "Or: checkpoint.keep is 'abc', but must be a mapping of the fields of Keep.",
    ]


def test_a_preset_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagereg.registry.REGISTRY, "decorated", [])
    stagereg.register("keep", "newest")(OfSteps)
    with stagereg.instantiate(composed(tmp_path).checkpoint) as checkpointer:
        assert checkpointer._target.keep == Keep()
