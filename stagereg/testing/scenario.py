"""One training loop in a join, run on ranks, and what was observed: the evidence for the contracts of joins.

A scenario says how many batches each rank has, which ``Join`` each runs, how, and what goes wrong on purpose. All the
scenarios of a contract share the processes of one ``run_ranks`` call, each in a process group of its own; so a plugin
that keeps its promises costs about as much as its slowest promise. One that hangs or dies costs further calls: what had
ended before is kept, what was going on is reported, and what had not begun is run in fresh processes.

What is to be seen is the contracts' business (``join``). Importing this imports no torch.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from stagereg.crash_report import summarize
from stagereg.errors import BrokenPromiseError, JoinError, PeerFailedError, UnevenInputsError
from stagereg.testing.ranks import RankFailure, run_ranks
from stagereg.testing.side_effects import changed, side_effects, strict
from stagereg.testing.worker import await_all, limited, new_group

__all__ = ["Observation", "Part", "RemoteError", "Scenario", "ScenarioResult", "batch", "played", "steps_of"]

_OURS_ALONE = ("mode", "loader", "timeout", "average", "process_group")
"""Options of stagereg's ``Join`` that torch's does not know."""


class Part(Protocol):
    """What a scenario needs of a contract; see there."""

    world_size: ClassVar[int]
    options: ClassVar[Mapping[str, Any]]
    timeout_s: ClassVar[float]

    def build(self) -> Any: ...
    def joinables(self, subject: Any) -> Sequence[Any]: ...
    def announce(self, joinables: Sequence[Any]) -> None: ...
    def step(self, subject: Any, value: float) -> object: ...
    def loop(self, join: Any, subject: Any, values: list[float]) -> None: ...
    def state(self, subject: Any) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Scenario:
    """What happens.

    Attributes:
        lengths: of each join that follows on the one before, how many batches each rank has.
        joins: on ranks with an even and on those with an odd number, whether torch's ``Join`` runs there.
        mode: of stagereg's ``Join``; ``"own"``: what the contract's options say.
        announced: how many batches each rank says it has, where that is not true.
        again: one ``Join`` object is entered for all, in place of a new one each time.
        iterates: the loop is over ``join.iterate``, and passes over empty batches.
        keywords: further keyword arguments of ``Join``.
        before: steps outside the join before it; after them comes one whose side effects are allowed.
        after: steps outside the join after it.
        stops: every rank raises after its first step.
        fails: rank 0 raises after its first step.
        looks: what else is observed: "side effects", "hooks", "sent", "place".
    """

    lengths: tuple[tuple[int, ...], ...]
    joins: tuple[bool, bool] = (False, False)
    mode: str | None = "own"
    announced: tuple[int, ...] = ()
    again: bool = False
    iterates: bool = False
    enable: bool = True
    throw: bool = False
    keywords: tuple[tuple[str, Any], ...] = ()
    before: int = 0
    after: int = 0
    stops: bool = False
    fails: bool = False
    looks: str = ""

    def __str__(self) -> str:
        """Describe it, for parentheses after what was observed."""
        if not self.lengths:
            return "no training"
        counts = " and then ".join(", ".join(map(str, lengths)) for lengths in self.lengths)
        kinds = ["torch's" if torchs else "stagereg's" for torchs in self.joins]
        whose = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} (even ranks) and {kinds[1]} (odd ranks)"
        parts = [f"{counts} batches on ranks 0, 1, ..., {whose} Join"]
        parts += [f"mode={self.mode}"] if self.mode != "own" and not all(self.joins) else []
        parts += ["the same Join entered again"] if self.again else []
        parts += ["join.iterate"] if self.iterates else []
        parts += ["enable=False"] if not self.enable else []
        parts += ["throw_on_early_termination=True"] if self.throw else []
        parts += [f"{key}={value!r}" for key, value in self.keywords]
        parts += ["every rank raising after a step"] if self.stops else []
        parts += ["rank 0 raising after a step"] if self.fails else []
        return ", ".join(parts)


@dataclass(frozen=True)
class RemoteError:
    """An exception, as far as it travels.

    Attributes:
        kind: name of its class.
        text: its message.
        trace: its traceback.
        injected: whether the scenario raised it itself.
        uneven: whether it is an :class:`stagereg.UnevenInputsError`.
        peer: whether it is a :class:`stagereg.PeerFailedError`.
    """

    kind: str
    text: str
    trace: str
    injected: bool
    uneven: bool
    peer: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.text.strip()}"


@dataclass
class Observation:
    """What one rank saw.

    Attributes:
        states: the state after each join, and once more after the steps that follow.
        done: how many steps ended within each join.
        error: what ended it.
        traces: what was left behind, one text each.
        mains: of each joinable's hooks, how often ``main_hook`` ran, by join.
        posts: likewise ``post_hook``.
        sent: how many collectives each step of this rank had in the last join.
        place: device and group of each joinable, and what is wrong with them.
        foreign: why it cannot be planned or counted; empty if it can.
        counts: whether a planned join with it counts after all.
    """

    states: list[Any] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    error: RemoteError | None = None
    traces: list[str] = field(default_factory=list)
    mains: dict[str, list[int]] = field(default_factory=dict)
    posts: dict[str, list[int]] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    place: list[str] = field(default_factory=list)
    foreign: str = ""
    counts: bool = False


@dataclass(frozen=True)
class ScenarioResult:
    """How a scenario went.

    Attributes:
        seen: by rank; ``None`` for one that did not come to its end.
        failure: what is known of those.
    """

    seen: tuple[Observation | None, ...]
    failure: str = ""


class InjectedError(Exception):
    """What the scenario itself raises."""


def batch(rank: int, join: int, step: int) -> float:
    """Return the value that stands for a batch; no two ranks have the same one in a step."""
    return 1.0 + ((7 * rank + 3 * step + 5 * join) % 16) / 8


def steps_of(scenario: Scenario, stage: int, world_size: int) -> list[list[float]]:
    """Return the values of the active ranks, step by step, up to the end of a stage: of a join, or of what follows."""
    steps = [[batch(rank, -1, step) for rank in range(world_size)] for step in range(scenario.before)]
    for join, lengths in enumerate(scenario.lengths[: stage + 1]):
        for step in range(max(lengths)):
            steps.append([batch(rank, join, step) for rank, length in enumerate(lengths) if step < length])
    if stage == len(scenario.lengths):
        steps += [[batch(rank, stage, step) for rank in range(world_size)] for step in range(scenario.after)]
    return steps


# -- where it is asked for

_played: weakref.WeakKeyDictionary[type, dict[Scenario, ScenarioResult]] = weakref.WeakKeyDictionary()


def played(contract: type[Part], scenario: Scenario, others: Sequence[Scenario]) -> ScenarioResult:
    """Return how a scenario went; it is run if it was not yet, and then ``others`` too, as far as it comes."""
    found = _played.setdefault(contract, {})
    while scenario not in found:
        todo = [each for each in dict.fromkeys([*others, scenario]) if each not in found]
        found.update(_call(contract, todo))
    return found[scenario]


def _call(contract: type[Part], todo: Sequence[Scenario]) -> dict[Scenario, ScenarioResult]:
    """Play in fresh processes; return how those went that began, which is one at least."""
    size = contract.world_size
    limit = contract.timeout_s * (len(todo) + 1) + 30.0
    with tempfile.TemporaryDirectory(prefix="stagereg-scenario-") as folder:
        failure = ""
        try:
            run_ranks(run_scenarios, size, args=(contract, tuple(todo), folder), timeout_s=limit)
        except RankFailure as error:
            failure = _in_short(error)
        found: dict[Scenario, ScenarioResult] = {}
        for number, each in enumerate(todo):
            seen = tuple(_read(Path(folder, f"{number}.{rank}")) for rank in range(size))
            if None in seen:
                # A rank that left nothing of this one may have died of the one before; run first, it is clear.
                if not found or any(seen) or " hung" in failure:
                    found[each] = ScenarioResult(seen, failure or _who_waited(seen))
                break
            found[each] = ScenarioResult(seen)
    return found


def _read(file: Path) -> Observation | None:
    if not file.exists():
        return None
    seen = pickle.loads(file.read_bytes())
    assert isinstance(seen, Observation)
    return seen


def _in_short(failure: RankFailure) -> str:
    """Who hung where, or died how."""
    lines = []
    for rank, text in {**failure.hung, **failure.failed}.items():
        if rank in failure.hung or re.search(r"Timeout \(\d+:", text):
            lines.append(f"rank {rank} hung{_standing(text)}")
        elif _GAVE_UP not in text:
            lines.append(f"rank {rank}: {summarize(text)}")
    return "; ".join(lines)


def _standing(stacks: str) -> str:
    """Where the thread of the scenario stood, innermost first."""
    for thread in re.split(r"(?:Current t|T)hread 0x", stacks):
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', thread)
        if any(file == __file__ for file, _, _ in frames):
            below = frames[: next(i for i, (file, _, _) in enumerate(frames) if file == __file__)]
            shown = [f"{function} ({Path(file).name}:{line})" for file, line, function in below]
            return f" in {', called by '.join(shown[:6])}" if shown else " waiting for the other ranks to end"
    return ""


def _who_waited(seen: Sequence[Observation | None]) -> str:
    """Of ranks that were ended when another had an error, and waited for nothing any more."""
    errors = [f"rank {rank} raised {each.error}" for rank, each in enumerate(seen) if each is not None and each.error]
    missing = ", ".join(str(rank) for rank, each in enumerate(seen) if each is None)
    return "; ".join([*errors, f"rank {missing} did not come to an end"])


# -- on the ranks

_GAVE_UP = "the other ranks have not come to the end of this scenario"


def run_scenarios(rank: int, world_size: int, contract: type[Part], todo: Sequence[Scenario], folder: str) -> None:
    """Play all, and write down what was seen of each as soon as it has ended."""
    for number, each in enumerate(todo):
        patience = contract.timeout_s
        with limited(patience):
            if number:
                new_group()
            seen = _Play(contract(), each, rank, world_size).run()
            _write(Path(folder, f"{number}.{rank}"), seen)
            # A rank with an error does not wait for long: the others may wait for it without end.
            if not await_all(f"scenario {number}", 0.75 * patience if seen.error else 2.0 * patience):
                raise BrokenPromiseError(_GAVE_UP)


def _write(file: Path, seen: Observation) -> None:
    beside = file.with_suffix(".part" + file.suffix)
    beside.write_bytes(pickle.dumps(seen))
    beside.rename(file)


class _Play:
    """One scenario on one rank."""

    def __init__(self, contract: Any, scenario: Scenario, rank: int, world_size: int) -> None:
        self._contract = contract
        self._what = scenario
        self._rank = rank
        self._world_size = world_size
        self._seen = Observation()
        self._in_join = False
        self._taken = 0

    def run(self) -> Observation:
        import torch

        torch.manual_seed(0)
        try:
            self._play()
        except Exception as error:
            self._seen.error = _remote(error)
        return self._seen

    def _play(self) -> None:
        subject = self._contract.build()
        joinables = list(self._contract.joinables(subject))
        self._contract.step = self._counted(self._contract.step, joinables)
        roots = [*zip(_names(joinables), joinables, strict=True), ("the subject", subject)]
        allowed: set[str] = set()
        before: dict[str, Any] = {}
        if "place" in self._what.looks:
            self._look_at_place(joinables)
        if "side effects" in self._what.looks:
            allowed, before = self._train_outside(subject, roots)
        if "hooks" in self._what.looks:
            for name, each in zip(_names(joinables), joinables, strict=True):
                self._count_hooks(name, each)
        try:
            self._joins(subject, joinables)
        finally:
            if "side effects" in self._what.looks:
                self._seen.traces = _traces(before, side_effects(roots), allowed, quiet=not self._is_ordinary)
        for step in range(self._what.after):
            self._contract.step(subject, batch(self._rank, len(self._what.lengths), step))
        if self._what.after:
            self._seen.states.append(_plain(self._contract.state(subject)))

    @property
    def _is_ordinary(self) -> bool:
        return not (self._what.stops or self._what.fails or self._what.throw)

    def _train_outside(self, subject: Any, roots: Sequence[tuple[str, Any]]) -> tuple[set[str], dict[str, Any]]:
        """Train without a join, and return what that changes, and how it leaves things."""
        taken: dict[str, Any] = {}
        for step in range(self._what.before):
            taken = side_effects(roots)
            self._contract.step(subject, batch(self._rank, -1, step))
        after = side_effects(roots)
        return set(changed(taken, after)), after

    def _joins(self, subject: Any, joinables: list[Any]) -> None:
        join = None
        for number, lengths in enumerate(self._what.lengths):
            self._taken = 0
            self._seen.sent.clear()
            for counts in (*self._seen.mains.values(), *self._seen.posts.values()):
                counts.append(0)
            if join is None or not self._what.again:
                join = self._join(joinables, lengths)
            values = [batch(self._rank, number, step) for step in range(lengths[self._rank])]
            try:
                with join:
                    self._in_join = True
                    self._run(join, subject, values)
            except UnevenInputsError:
                self._seen.states.append(_plain(self._contract.state(subject)))
                raise
            finally:
                self._in_join = False
                self._seen.done.append(self._taken)
            self._seen.states.append(_plain(self._contract.state(subject)))

    def _run(self, join: Any, subject: Any, values: list[float]) -> None:
        if not self._what.iterates:
            self._contract.loop(join, subject, values)
            return
        import torch

        for x in join.iterate([torch.tensor([value], dtype=torch.float64) for value in values]):
            if len(x):
                self._contract.step(subject, x.item())

    def _join(self, joinables: list[Any], lengths: Sequence[int]) -> Any:
        what = self._what
        options = {**self._contract.options, **dict(what.keywords)}
        if what.joins[self._rank % 2]:
            from torch.distributed.algorithms.join import Join as TorchJoin

            options = {key: value for key, value in options.items() if key not in _OURS_ALONE}
            return TorchJoin(joinables, what.enable, what.throw, **options)
        from stagereg.join.context import Join

        options.setdefault("timeout", self._contract.timeout_s / 2)
        if what.mode != "own":
            options["mode"] = what.mode
        if options.get("mode") in ("planned", "auto"):
            options["loader"] = range((what.announced or lengths)[self._rank])
        return Join(joinables, what.enable, what.throw, **options)

    def _counted(self, step: Callable[[Any, Any], object], joinables: list[Any]) -> Callable[[Any, Any], object]:
        def counted(subject: Any, value: Any) -> object:
            if self._in_join and self._taken == 1 and (self._what.stops or (self._what.fails and self._rank == 0)):
                raise InjectedError(f"raised on rank {self._rank} on purpose")
            before = _sent()
            self._contract.announce(joinables)
            result = step(subject, value)
            if self._in_join:
                self._taken += 1
                if "sent" in self._what.looks:
                    self._seen.sent.append(_sent() - before)
            return result

        return counted

    def _count_hooks(self, name: str, joinable: Any) -> None:
        seen, make = self._seen, getattr(joinable, "join_hook", None)
        if make is None:
            return

        def made(**kwargs: Any) -> Any:
            hook = make(**kwargs)
            main, post = hook.main_hook, hook.post_hook

            def main_hook() -> None:
                seen.mains[name][-1] += 1
                main()

            def post_hook(is_last_joiner: bool) -> None:
                seen.posts[name][-1] += 1
                post(is_last_joiner)

            with contextlib.suppress(AttributeError):
                hook.main_hook, hook.post_hook = main_hook, post_hook
                seen.mains.setdefault(name, [0])
                seen.posts.setdefault(name, [0])
            return hook

        with contextlib.suppress(AttributeError):
            joinable.join_hook = made

    def _look_at_place(self, joinables: list[Any]) -> None:
        import torch
        import torch.distributed as dist

        from stagereg.join.adapt import auto
        from stagereg.join.context import Join

        for each in joinables:
            if hasattr(each, "join_device"):
                name, device, group = type(each).__name__, each.join_device, each.join_process_group
                group = dist.group.WORLD if group is None else group
                if not isinstance(device, torch.device):
                    self._seen.place.append(f"{name}.join_device is {device!r}, no torch.device")
                elif not isinstance(group, dist.ProcessGroup):
                    self._seen.place.append(f"{name}.join_process_group is {group!r}, no process group of this rank")
                elif group.size() != self._world_size:
                    self._seen.place.append(
                        f"{name}.join_process_group has {group.size()} of the {self._world_size} ranks that train"
                    )
                else:
                    total = torch.ones(1, device=device)
                    dist.all_reduce(total, group=group)
                    if total.item() != self._world_size:
                        self._seen.place.append(f"a sum of ones over {name}.join_process_group is {total.item():g}")
        if self._seen.place:
            return
        divides = self._contract.options.get("divide_by_initial_world_size", True)
        self._seen.counts = any(auto(each).needs_active_ranks(divides) for each in joinables)
        try:
            with Join(joinables, mode="counted", timeout=self._contract.timeout_s / 2):
                pass
        except JoinError as error:
            self._seen.foreign = str(error)


def _names(joinables: Sequence[Any]) -> list[str]:
    """The joinables' classes, numbered where that is not enough."""
    kinds = [type(each).__name__ for each in joinables]
    return [f"{kind} {i}" if kinds.count(kind) > 1 else kind for i, kind in enumerate(kinds)]


def _traces(before: Mapping[str, Any], after: Mapping[str, Any], allowed: set[str], quiet: bool) -> list[str]:
    """What the join has left behind; if ``quiet``, only where a training step leaves nothing."""
    found = changed(before, after)
    return [text for place, text in found.items() if place not in allowed and (strict(place) or not quiet)]


def _remote(error: BaseException) -> RemoteError:
    trace = "".join(traceback.format_exception(error))
    peer, uneven = isinstance(error, PeerFailedError), isinstance(error, UnevenInputsError)
    return RemoteError(type(error).__name__, str(error), trace, isinstance(error, InjectedError), uneven, peer)


def _plain(state: Any) -> Any:
    """A state as it is now, in tensors of the CPU and numbers."""
    import torch

    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def _sent() -> int:
    """How many collectives this rank has begun, in all process groups and their control channels."""
    from torch.distributed.distributed_c10d import _world

    from stagereg.kernel.channel import resources_of

    groups = list(_world.pg_map)
    return sum(_numbers([*groups, *(backend for group in groups for backend in resources_of(group).backends())]))


def _numbers(groups: Any) -> Iterator[int]:
    for group in list(groups):
        with contextlib.suppress(RuntimeError, AttributeError):
            yield int(group._get_sequence_number_for_group())
