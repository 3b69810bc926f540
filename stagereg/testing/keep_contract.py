"""The contract of a retention rule (a component of the kind ``keep``): a class of tests to inherit.

Each test simulates a run. After each commit, the test passes all checkpoints to the rule, as ``Checkpointer`` does. The
rule returns the checkpoints to retain; in a real run, the checkpointer then deletes the others.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest, step_name
from stagereg.checkpoint.store.keep import KeepRule
from stagereg.testing.contract import Contract

_RUNS = {
    "a long run": list(range(0, 200, 5)),
    "a run that was rolled back": [10, 20, 30, 40, 20, 30, 25, 1000, 1001],
    "a run that saved one step several times": [7, 7, 7, 8, 8],
}
"""Simulated runs: the steps of the checkpoints, in commit order."""
_MANY = 500  # checkpoints in one directory
_ODD: tuple[dict[str, float], ...] = (
    {},
    {"loss": math.nan},
    {"loss": math.inf},
    {"loss": -math.inf, "a/b": 1.0},
    {"other": 0.0},
    {"loss": 0.5},
)


class KeepContract(Contract):
    """Tests of a retention rule. Inherit this class, and override :meth:`make`.

    Define the subclass at module level, so that the ranks of a test can import it.
    """

    def make(self) -> KeepRule:
        """Return a new retention rule. Called at least once per test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a simulated run at a step. Override this method if the rule requires a metric."""
        return {"loss": 1.0 + abs(math.sin(step))}

    def test_newest_is_retained(self) -> None:
        """The rule retains the newest checkpoint. (If a rule retains none, the checkpointer deletes nothing.)"""
        for what, steps in _RUNS.items():
            list(self._play(what, steps))

    def test_paths_and_reasons(self) -> None:
        """The rule returns a mapping from paths of given checkpoints to reasons, each reason in one line of text."""
        for what, steps in _RUNS.items():
            for shown, answer in self._play(what, steps):
                paths = {each.path for each in shown}
                for path, why in answer.items():
                    if path not in paths:
                        self.broken(f"{what}: it returned {path!r}, which is not the path of a given checkpoint")
                    if not isinstance(why, str) or not why.strip() or not why.isprintable():
                        self.broken(f"{what}: its reason for {path} must be a line of text, got {why!r}")

    def test_none_and_one(self) -> None:
        """The rule returns an empty mapping for an empty list, and retains a single checkpoint of any step."""
        if answer := self._ask(self.make(), []):
            self.broken(f"for no checkpoints it returned {answer!r:.200}")
        for step in (0, 1, 7, 1000):
            list(self._play("a single checkpoint", [step]))

    def test_any_metrics(self) -> None:
        """The rule accepts checkpoints with missing, unknown, NaN or infinite metrics."""
        made = self._checkpoints("/runs", range(len(_ODD)))
        odd = [replace(one, manifest=replace(one.manifest, metrics=more)) for one, more in zip(made, _ODD, strict=True)]
        for newest in range(len(odd)):
            self._retained("with odd metrics", self.make(), odd[newest:])

    def test_same_answer_again(self) -> None:
        """For the same checkpoints, a second call, a new rule and reordered metrics give the same decision."""
        for what, steps in _RUNS.items():
            rule = self.make()
            for shown, answer in self._play(what, steps, rule):
                for how, other, turned in (
                    ("again", rule, False),
                    ("a new rule", self.make(), False),
                    ("with the metrics in another order", rule, True),
                ):
                    if differs := sorted(self._ask(other, shown, turned).keys() ^ answer.keys()):
                        self.broken(f"{what}: {how}, it decides differently about {differs[0]}")

    def test_leaves_all_as_it_is(self) -> None:
        """The rule changes neither its arguments nor any file, because the checkpointer deletes the checkpoints."""
        with tempfile.TemporaryDirectory(prefix="stagereg-") as folder:
            made = self._checkpoints(folder, range(9))
            for each in made:
                Path(each.path).mkdir()
                Path(each.path, "a").write_bytes(b"a")
            shown, metrics = list(made), {each.path: dict(each.manifest.metrics) for each in made}
            before = deepcopy(metrics)
            self.within(lambda: self.make().select(shown, metrics))
            if (shown, metrics) != (made, before):
                self.broken("it changed the given list or metrics")
            if gone := [each.path for each in made if not Path(each.path, "a").exists()]:
                self.broken(f"it deleted {gone[0]}")

    def test_paths_are_only_names(self) -> None:
        """The rule does not open the paths of checkpoints, which are URLs if the checkpoints are in an object store."""
        self._retained("in an object store", self.make(), self._checkpoints("s3://bucket/runs", range(0, 50, 10)))

    def test_many_checkpoints(self) -> None:
        """The rule returns quickly, even for hundreds of checkpoints, because the saver thread waits for the result."""
        self._retained(f"with {_MANY} checkpoints", self.make(), self._checkpoints("/runs", range(_MANY)))

    def test_rank_0_alone(self) -> None:
        """The rule does not use the process group: all ranks construct the rule, but only rank 0 calls it."""
        self.on_rank_0("_call_on_rank_0")

    def _call_on_rank_0(self, rank: int) -> None:
        rule = self.make()
        if rank == 0:
            self._retained("a run", rule, self._checkpoints("/runs", range(0, 50, 10)))

    def _play(
        self, what: str, steps: Sequence[int], rule: KeepRule | None = None
    ) -> Iterator[tuple[list[Checkpoint], dict[str, str]]]:
        """After each commit of a simulated run, yield the checkpoints passed to the rule, and the rule's result."""
        rule = rule or self.make()
        there: list[Checkpoint] = []
        for made in reversed(self._checkpoints("/runs", steps)):
            there = [made, *there]
            answer = self._retained(what, rule, there)
            yield there, answer
            there = [each for each in there if each.path in answer]

    def _retained(self, what: str, rule: KeepRule, shown: list[Checkpoint]) -> dict[str, str]:
        """Return the rule's result for the checkpoints, after a check that it contains the newest one."""
        answer = self._ask(rule, shown)
        if shown[0].path not in answer:
            of = f"{len(shown)} checkpoints" if len(shown) > 1 else "one checkpoint"
            self.broken(f"{what}: of {of}, it does not retain the newest, step {shown[0].manifest.step}")
        return answer

    def _ask(self, rule: KeepRule, shown: list[Checkpoint], turned: bool = False) -> dict[str, str]:
        metrics = {each.path: dict(each.manifest.metrics) for each in (shown[::-1] if turned else shown)}
        answer: Any = self.within(lambda: rule.select(list(shown), metrics))
        if not isinstance(answer, Mapping):
            self.broken(f"it must return a mapping from paths to reasons, got {answer!r:.200}")
        return dict(answer)

    def _checkpoints(self, folder: str, steps: Sequence[int]) -> list[Checkpoint]:
        """Return checkpoints for the given steps, newest first. Repeated steps get different directory names."""
        made: list[Checkpoint] = []
        for serial, step in enumerate(steps, 1):
            token = f".{serial:012x}" if step in steps[: serial - 1] else ""
            files = {"a": FileDigest(1000 + serial, 0)}
            manifest = Manifest(step, 2, serial, files, time=60 * serial, metrics=self.metrics(step))
            made.append(Checkpoint(f"{folder}/{step_name(step)}{token}", manifest))
        return made[::-1]
