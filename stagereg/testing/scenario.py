"""Runs training loops in a join on several ranks, and records results and side effects for the contracts of joins.

A scenario is one such loop with its settings. A contract runs each scenario once, in separate processes. To find side
effects of a join, the attributes and hooks of all objects reachable from the joinables are compared before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import types
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.distributed_c10d import _world
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from stagereg.base.crash_report import summarize_exception
from stagereg.errors import PeerFailedError, UnevenInputsError
from stagereg.join.context import Join
from stagereg.kernel.broken import is_lost_connection
from stagereg.kernel.channel import resources_of
from stagereg.testing.crash_text import innermost_frame, summarize
from stagereg.testing.ranks import RankFailure, run_ranks

_OURS_ALONE = ("mode", "loader", "timeout", "average", "process_group")
"""Options of stagereg's ``Join`` that torch's does not have."""
_STARTING_S = 5.0  # seconds that ranks may need before the training loop starts
_HURRIED_S = 6.0  # minimum time limit in seconds, after an earlier loop of the contract hung
_DEPTH = 4
_MANY = 64
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_SETS_ITSELF = {"_authoritative_rank"}  # attributes that torch itself sets on a joined module, so not side effects


@dataclass(frozen=True)
class Scenario:
    """The settings of a training loop with one or more joins."""

    lengths: tuple[tuple[int, ...], ...]  # for each consecutive join, the number of batches of each rank
    torchs: tuple[bool, bool] = (False, False)  # whether even ranks and odd ranks use torch's Join
    mode: str | None = "own"  # mode of stagereg's Join; "own" uses the mode in the contract's options
    iterates: bool = False  # whether to loop over join.iterate and skip empty batches
    enable: bool = True
    throw: bool = False
    before: int = 0  # number of steps before the join; side effects of the last step are not blamed on the join
    after: int = 0  # number of steps after the join
    failing: int = 0  # the first N ranks raise an error after their first step

    def __str__(self) -> str:
        counts = " and then ".join(", ".join(map(str, lengths)) for lengths in self.lengths)
        shown = dataclasses.fields(self)[1:]
        options = [f"{f.name}={getattr(self, f.name)}" for f in shown if getattr(self, f.name) != f.default]
        return ", ".join([f"{counts} batches on ranks 0, 1, ...", *options])


@dataclass
class Observation:
    """The results and side effects of a scenario on one rank."""

    states: list[Any] = field(default_factory=list)  # the state after each join, and after the steps after all joins
    done: list[int] = field(default_factory=list)  # for each join, the number of completed steps
    error: str = ""  # the error and its source line; empty if the rank raised no error
    kind: str = ""  # kind of the error: "injected" on purpose, "uneven" inputs, a "peer" that failed, or "other"
    traces: list[str] = field(default_factory=list)  # descriptions of the side effects
    sent: list[int] = field(default_factory=list)  # for each step in the last join, the number of collectives


@dataclass(frozen=True)
class ScenarioResult:
    """The observations of all ranks in one scenario."""

    seen: tuple[Observation | None, ...]  # in rank order; None for a rank that did not finish
    failure: str = ""  # why ranks did not finish


class InjectedError(Exception):
    """The error that a scenario raises on purpose, to simulate a failing rank."""


_KINDS = {InjectedError: "injected", UnevenInputsError: "uneven", PeerFailedError: "peer"}


def batch(rank: int, join: int, step: int) -> float:
    """Return the number that serves as a batch. In each step, the number differs between ranks."""
    return 1.0 + ((7 * rank + 3 * step + 5 * join) % 16) / 8


def steps_of(scenario: Scenario, stage: int, world_size: int) -> list[list[float]]:
    """Return, for each step up to the end of join ``stage``, the batches of the ranks that have data.

    ``stage`` equal to the number of joins also includes the steps after the last join.
    """
    steps = [[batch(rank, -1, step) for rank in range(world_size)] for step in range(scenario.before)]
    for join, lengths in enumerate(scenario.lengths[: stage + 1]):
        for step in range(max(lengths)):
            steps.append([batch(rank, join, step) for rank, length in enumerate(lengths) if step < length])
    if stage == len(scenario.lengths):
        steps += [[batch(rank, stage, step) for rank in range(world_size)] for step in range(scenario.after)]
    return steps


# -- running scenarios

_played: weakref.WeakKeyDictionary[type, dict[Scenario, ScenarioResult]] = weakref.WeakKeyDictionary()
_hung: weakref.WeakSet[type] = weakref.WeakSet()  # contracts of which at least one scenario hung


def played(contract: Any, scenario: Scenario) -> ScenarioResult:
    """Return the result of a scenario. The first call for a contract and scenario runs it; later calls reuse it."""
    known = _played.setdefault(contract, {})
    if scenario not in known:
        known[scenario] = _run(contract, scenario, _limit_s(contract))
    return known[scenario]


def _run(contract: Any, scenario: Scenario, limit_s: float) -> ScenarioResult:
    began = time.monotonic()
    try:
        args = contract, scenario, limit_s
        return ScenarioResult(tuple(run_ranks(play, contract.world_size, args=args, timeout_s=limit_s + _STARTING_S)))
    except RankFailure as error:
        return ScenarioResult(tuple(map(error.returned.get, range(contract.world_size))), _in_short(error))
    finally:
        if time.monotonic() - began > limit_s / 2:  # The time limit of stagereg's Join is half of limit_s.
            _hung.add(contract)


def _limit_s(contract: Any) -> float:
    """Return the time limit of a scenario in seconds: a third after a hang, because more scenarios may hang."""
    limit_s: float = contract.timeout_s
    return min(limit_s, max(limit_s / 3, _HURRIED_S)) if contract in _hung else limit_s


def _in_short(failure: RankFailure) -> str:
    lines, advice = [], ""
    for rank, text in {**failure.hung, **failure.failed}.items():
        hung = rank in failure.hung
        line = f"rank {rank} hung in {innermost_frame(text)}" if hung else f"rank {rank}: {summarize(text)}"
        if other := re.search(r"(\d+) vs (\d+)\. Received data", text):
            sizes = f"received {other[1]} bytes of another rank's collective, but expected {other[2]}"
            line = f"rank {rank} {sizes}, in {innermost_frame(text)}"
        if hung or other:
            advice = ". All ranks must run the same collectives in the same order; main_hook() must run those of a step"
        lines.append(line)
    return "; ".join(lines) + advice


# -- on the ranks


def play(rank: int, world_size: int, contract: Any, scenario: Scenario, limit_s: float) -> Observation:
    """Run a scenario on a rank, and return its observations."""
    return _Play(contract(), scenario, rank, limit_s).run()


class _Play:
    def __init__(self, contract: Any, scenario: Scenario, rank: int, limit_s: float) -> None:
        self._contract = contract
        self._what = scenario
        self._rank = rank
        self._limit_s = limit_s
        self._seen = Observation()
        self._in_join = False
        self._taken = 0

    def run(self) -> Observation:
        torch.manual_seed(0)
        try:
            self._play()
        except Exception as error:
            self._seen.error = summarize_exception(error)
            other = "peer" if is_lost_connection(error) else "other"
            self._seen.kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), other)
        return self._seen

    def _play(self) -> None:
        what, contract = self._what, self._contract
        subject = contract.build()
        self._joinables = list(contract.joinables(subject))
        self._step, contract.step = contract.step, self._observed_step
        kinds = [type(each).__name__ for each in self._joinables]
        names = [f"{kind} {i}" if kinds.count(kind) > 1 else kind for i, kind in enumerate(kinds)]
        roots = [*zip(names, self._joinables, strict=True), ("the subject", subject)]
        taken: dict[str, Any] = {}
        for step in range(what.before):
            taken = side_effects(roots)
            contract.step(subject, batch(self._rank, -1, step))
        before = side_effects(roots) if what.before else {}
        allowed = changed(taken, before)
        try:
            for number in range(len(what.lengths)):
                self._train_in_join(subject, number)
        finally:
            found = changed(before, side_effects(roots)) if before else {}
            self._seen.traces = [text for at, text in found.items() if at not in allowed]
        for step in range(what.after):
            contract.step(subject, batch(self._rank, len(what.lengths), step))
        if what.after:
            self._note_state(subject)

    def _note_state(self, subject: Any) -> None:
        state = dict(self._contract.state(subject))
        self._seen.states.append(tree_map_only(torch.Tensor, lambda x: x.detach().cpu().clone(), state))

    def _train_in_join(self, subject: Any, number: int) -> None:
        length = self._what.lengths[number][self._rank]
        values = [batch(self._rank, number, step) for step in range(length)]
        self._taken = 0
        self._seen.sent.clear()
        join = self._join(length)
        try:
            with join:
                self._in_join = True
                if self._what.iterates:
                    batches = [torch.tensor([value], dtype=torch.float64, device="cpu") for value in values]
                    for x in join.iterate(batches):
                        if len(x):
                            self._contract.step(subject, x.item())
                else:
                    self._contract.loop(join, subject, values)
        except UnevenInputsError:
            self._note_state(subject)
            raise
        finally:
            self._in_join = False
            self._seen.done.append(self._taken)
        self._note_state(subject)

    def _join(self, length: int) -> Any:
        what = self._what
        options = {**self._contract.options, "colour": "red"}  # an option that only another joinable would understand
        if what.torchs[self._rank % 2]:
            theirs = {key: value for key, value in options.items() if key not in _OURS_ALONE}
            return TorchJoin(self._joinables, what.enable, what.throw, **theirs)
        options.setdefault("timeout", self._limit_s / 2)
        if what.mode != "own":
            options["mode"] = what.mode
        if options.get("mode") in ("planned", "auto"):
            options["loader"] = range(length)
        return Join(self._joinables, what.enable, what.throw, **options)

    def _observed_step(self, subject: Any, value: Any) -> object:
        if self._in_join and self._taken == 1 and self._rank < self._what.failing:
            raise InjectedError(f"raised on rank {self._rank} on purpose")
        before = _begun_collectives()
        self._contract.announce(self._joinables)
        result = self._step(subject, value)
        if self._in_join:
            self._taken += 1
            self._seen.sent.append(_begun_collectives() - before)
        return result


def _begun_collectives() -> int:
    """Return the number of collectives that this process has started, in all process groups and control channels."""
    groups = list(_world.pg_map)
    begun = 0
    for each in [*groups, *(backend for group in groups for backend in resources_of(group).backends())]:
        with contextlib.suppress(RuntimeError, AttributeError):
            begun += int(each._get_sequence_number_for_group())
    return begun


# -- side effects


def side_effects(roots: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the attributes and hooks of all objects reachable from ``roots``, by path, for :func:`changed`."""
    found: dict[str, Any] = {"Python's warning filters": list(warnings.filters)}
    known: dict[int, Any] = {}  # visited objects by id; the references keep ids unique
    for name, thing in roots:
        _visit(name, thing, _DEPTH, found, known)
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Compare two results of :func:`side_effects`. Return a dict from the path of each change to its description."""
    # Skip new and deleted objects: the attribute that refers to them has changed, and is listed.
    differ = [(place, was, after[place]) for place, was in before.items() if after.get(place, was) != was]
    return {place: f"{place}: {_text(was, now)}" for place, was, now in differ}


def _text(was: Any, now: Any) -> str:
    if isinstance(was, frozenset):
        came, went = sorted(now - was), sorted(was - now)
        return ", ".join([*(f"now also {name!r}" for name in came), *(f"no longer {name!r}" for name in went)])
    return "changed" if isinstance(was, list) else f"was {was}, is {now}"


def _visit(name: str, thing: Any, depth: int, found: dict[str, Any], known: dict[int, Any]) -> None:
    if depth == 0 or id(thing) in known:
        return
    known[id(thing)] = thing
    if isinstance(thing, nn.Module):
        for path, part in thing.named_modules(prefix=name):
            known[id(part)] = part
            found |= _own(path, part)
    elif isinstance(thing, Optimizer):
        found |= _own(name, thing)
    elif isinstance(thing, (list, tuple, Mapping)):
        members = list(thing.items() if isinstance(thing, Mapping) else enumerate(thing))
        for key, each in members[:_MANY]:
            _visit(f"{name}[{key!r}]", each, depth - 1, found, known)
    elif isinstance(thing, types.MethodType):
        _visit(name, thing.__self__, depth, found, known)
    # Do not follow other objects of torch and Python, because they refer to unrelated objects.
    elif hasattr(thing, "__dict__") and type(thing).__module__.partition(".")[0] not in ("torch", "builtins"):
        found |= _own(name, thing)
        for attribute, value in vars(thing).items():
            if attribute != "_join_config":
                simple = isinstance(value, _SIMPLE)
                found[f"{name}.{attribute}"] = value if simple else f"a {type(value).__name__}"
                _visit(f"{name}.{attribute}", value, depth - 1, found, known)


def _own(name: str, thing: Any) -> dict[str, Any]:
    """Return the names of an object's attributes, its number of hooks of each kind, and whether it is in a join."""
    own = vars(thing)
    kept = {key: value for key, value in own.items() if key.endswith("hooks") and isinstance(value, (Mapping, list))}
    config = own.get("_join_config")
    return {
        f"attributes of {name}": frozenset(own) - _SETS_ITSELF,
        f"hooks on {name}": {key.strip("_").replace("_", " "): len(value) for key, value in kept.items() if value},
        f"join of {name}": "switched on" if config is not None and config.enable else "switched off",
    }
