"""The contracts (= classes of tests) for joinables and join hooks.

The author inherits a contract, and defines how to construct the component, how to run one training step, and which
result a single process computes. The tests run training loops on several ranks (see ``scenario``), and compare the
results. ``docs/contracts.md`` lists the promises and has a complete example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from stagereg.join.joinable import BuiltInJoinable, notify
from stagereg.testing.contract import Contract
from stagereg.testing.scenario import Observation, Scenario, ScenarioResult, played, steps_of

_NEVER_TRAINED = ("hooks on", "attributes of", "join of", "Python's warning filters")


class JoinableContract(Contract):
    """Tests of a joinable. Inherit this class, and override the methods that raise ``NotImplementedError``.

    :meth:`build`, :meth:`joinables`, :meth:`step`, :meth:`loop` and :meth:`state` run on ranks, in a process group and
    with the same seed on all ranks. :meth:`expected` runs in the calling process. Define the subclass at module level,
    so that the ranks can import it.

    Attributes:
        world_size: the number of ranks, at least 2.
        options: keyword arguments of ``Join``, such as ``{"divide_by_initial_world_size": False}``.
        torch_join: whether the joinable must also work in torch's ``Join``, including if only some ranks use it.
        announces: whether the joinable notifies stagereg's ``Join`` before each step. torch's own joinables do not,
            so they support neither planned nor counted mode.
        own_collectives: the number of collectives that the joinable intentionally adds to each step of a planned join.
        keeps: names of attributes that a join may change permanently, though training without a join does not.
        tolerance: both ``rtol`` and ``atol`` of ``torch.testing.assert_close``, which compares results.
        timeout_s: time limit of a training run in seconds; longer runs count as hung. In stagereg's ``Join``, ranks
            that wait for each other time out after half this time. After a hang, later runs get a third of it.
    """

    world_size: ClassVar[int] = 2
    options: ClassVar[Mapping[str, Any]] = {}
    torch_join: ClassVar[bool] = True
    announces: ClassVar[bool] = True
    own_collectives: ClassVar[int] = 0
    keeps: ClassVar[Sequence[str]] = ()
    tolerance: ClassVar[float] = 1e-9

    # -- defined by the author

    def build(self) -> Any:
        """Return the ``subject`` that the other methods receive: a new joinable, or an object that contains it."""
        raise NotImplementedError(f"{type(self).__name__} must define build(self)")

    def joinables(self, subject: Any) -> Sequence[Any]:
        """Return the joinables to pass to ``Join``, in order. Called once per subject. Default: only the subject.

        torch's ``Join`` accepts only joinables, so wrap optimizers and functions in joinables.
        """
        return [subject]

    def step(self, subject: Any, value: float) -> object:
        """Run one training step on a rank that has data. ``value`` is the batch, which differs by rank. Collective."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, subject, value)")

    def loop(self, join: Any, subject: Any, values: list[float]) -> None:
        """Loop over the batches ``values`` of this rank, within the join. Default: call :meth:`step` for each batch.

        Override this method only for joinables that require ``join.iterate``. Each iteration must call ``self.step``.
        """
        for value in values:
            self.step(subject, value)

    def state(self, subject: Any) -> Mapping[str, Any]:
        """Return a dict of the tensors and numbers that must be correct on every rank after a join. Collective."""
        raise NotImplementedError(f"{type(self).__name__} must define state(self, subject)")

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        """Return the correct result of :meth:`state`, computed in a single process.

        ``steps``: for each step, the batches of the ranks that still have data, in rank order.
        """
        raise NotImplementedError(f"{type(self).__name__} must define expected(self, steps, world_size)")

    def announce(self, joinables: Sequence[Any]) -> None:
        """Notify ``Join`` of the next step, if the component does not do so itself. Called before each step."""

    # -- the tests

    def test_even_inputs(self) -> None:
        """With the same number of batches on every rank, all ranks compute the same results as a single process."""
        self._right("even")

    def test_uneven_inputs(self) -> None:
        """If ranks run out of data in any order, or have none, the results on all ranks equal a single process's."""
        self._right("uneven", "first has none", "last has none")

    def test_join_after_join(self) -> None:
        """After each of two joins in sequence, the results are correct."""
        self._right("two joins")

    def test_replicas_do_not_drift(self) -> None:
        """After every join the state is the same on all ranks, bit for bit."""
        for name in ("even", "uneven", "first has none", "last has none", "two joins"):
            for stage, states in enumerate(zip(*(seen.states for seen in self._ended(name)), strict=False)):
                for rank, state in enumerate(states[1:], 1):
                    if apart := _apart(state, states[0], 0.0):
                        self._broken(name, f"rank {rank} and rank 0 differ after join {stage + 1}: {apart}")

    def test_every_mode(self) -> None:
        """The results are correct with planned lengths, with mode=counted, and with empty batches of join.iterate."""
        self._needs_announcing()
        self._right("planned", "counted", *([] if self._has_own_loop else ["iterate"]))

    def test_planned_sends_nothing_more(self) -> None:
        """A planned join adds no collective to a step; a counted join adds one all-reduce."""
        self._needs_announcing()
        for name, more in (("planned", 0), ("counted", 1)):
            for rank, (seen, alone) in enumerate(zip(self._ended(name), self._ended("disabled"), strict=True)):
                most, without = max(seen.sent), max(alone.sent)
                right = without + more + self.own_collectives
                if most > right:
                    had = f"a step of rank {rank} ran {most} collectives; without a join it runs {without}"
                    self._broken(name, f"{had}, so at most {right} are allowed")

    def test_torchs_join(self) -> None:
        """Results are correct in torch's Join, also if some ranks use stagereg's Join with mode=torch instead."""
        if not self.torch_join:
            self.skipped("torch_join = False: it works in stagereg's Join only")
        self._right("torch's", "mixed", "mixed the other way")

    def test_failing_rank(self) -> None:
        """If a rank fails, every other rank soon raises an error that names it, even a rank that has no data left."""
        for name in ("fails", "fails while others have left"):
            for rank, seen in enumerate(self._seen(name)):
                if not seen.error:
                    self._broken(name, f"rank {rank} raised no error after rank 0 had failed")
                if seen.kind != ("peer" if rank else "injected") or "on purpose" not in seen.error:
                    self._broken(name, f"rank {rank} raised {seen.error}, not the error of rank 0")

    def test_throw(self) -> None:
        """With throw=True, all ranks stop before the first step for which a rank lacks data, with unchanged state.

        A planned join stops before its first step. If all ranks have the same number of batches, none raises an error.
        """
        self._right("throws not")
        names = ("throws", "throws in mode counted", "throws in mode planned", "throws in mode torch")
        for name in filter(self._is_due, names):
            self._throws(name)

    def test_training_without_a_join(self) -> None:
        """Training has correct results before and after a join, and in a join with enable=False."""
        self._right("side effects", "disabled")

    def test_leaves_no_trace(self) -> None:
        """A join restores the joinable, all objects it watched, and Python's warning filters, also after an error."""
        for name in ("side effects", "side effects of stopped", "side effects of thrown", "disabled"):
            for rank, seen in enumerate(self._seen(name)):
                if seen.kind not in ("", "injected", "uneven"):
                    self._broken(name, f"rank {rank} raised {seen.error}")
                # After an error, only properties that training never changes can be compared.
                judged = [trace for trace in seen.traces if not seen.kind or trace.startswith(_NEVER_TRAINED)]
                if left := [trace for trace in judged if not self._is_kept(trace)]:
                    self._broken(name, f"on rank {rank} the join left {'; '.join(left[:4])}")

    # -- the scenarios

    @classmethod
    def _plan(cls) -> dict[str, Scenario]:
        size = cls.world_size
        even, uneven, other = (3,) * size, ((1, 3, 2) * size)[:size], ((3, 1, 2) * size)[:size]
        first_none, last_none = (0, *(2,) * (size - 1)), (*(2,) * (size - 1), 0)
        return {
            "even": Scenario((even,)),
            "throws not": Scenario((even,), throw=True),
            "disabled": Scenario((even,), enable=False, before=2),
            "throws": Scenario((other,), throw=True),
            "throws in mode counted": Scenario((uneven,), mode="counted", throw=True),
            "throws in mode torch": Scenario((uneven,), mode="torch", throw=True),
            "throws in mode planned": Scenario((uneven,), mode="planned", throw=True),
            "side effects of stopped": Scenario((even,), failing=size, before=2),
            "side effects of thrown": Scenario((uneven,), throw=True, before=2),
            "fails": Scenario((even,), failing=1),
            "uneven": Scenario((uneven,)),
            "first has none": Scenario((first_none,)),
            "last has none": Scenario((last_none,)),
            "two joins": Scenario((uneven, other)),
            "planned": Scenario((uneven, other), mode="planned"),
            "counted": Scenario((uneven, other), mode="counted"),
            "iterate": Scenario((uneven, other), mode="auto", iterates=True),
            "torch's": Scenario((uneven, first_none), (True, True)),
            "mixed": Scenario((uneven, last_none), (True, False), mode="torch"),
            "mixed the other way": Scenario((other, first_none), (False, True), mode="torch"),
            "side effects": Scenario((uneven,), before=2, after=2),
            "fails while others have left": Scenario(((3, *(1,) * (size - 1)),), failing=1),
        }

    def _is_due(self, name: str) -> bool:
        scenario = self._plan()[name]
        if scenario.mode == "torch" or any(scenario.torchs):
            return self.torch_join
        return not (scenario.iterates and self._has_own_loop) and (self.announces or scenario.mode == "own")

    def _result(self, name: str) -> ScenarioResult:
        if self.world_size < 2:
            self.broken(f"world_size must be at least 2, got {self.world_size}. Set it to 2 or 3")
        return played(type(self), self._plan()[name])

    def _broken(self, name: str, seen: str) -> None:
        self.broken(f"{seen} ({self._plan()[name]})")

    def _seen(self, name: str) -> list[Observation]:
        """Return each rank's observations of a training run that must finish on all ranks."""
        result = self._result(name)
        if None in result.seen:
            self._broken(name, f"rank {result.seen.index(None)} did not finish: {result.failure}")
        return [seen for seen in result.seen if seen is not None]

    def _ended(self, name: str) -> list[Observation]:
        """Return each rank's observations of a training run that must not raise. Reports original errors first."""
        failed = {rank: seen for rank, seen in enumerate(self._result(name).seen) if seen and seen.error}
        own = {rank: seen for rank, seen in failed.items() if seen.kind != "peer"}
        ended = self._seen(name) if not own else []
        for rank, seen in (own or failed).items():
            self._broken(name, f"rank {rank} raised {seen.error}")
        return ended

    def _right(self, *names: str) -> None:
        for name in names:
            for rank, seen in enumerate(self._ended(name)):
                for stage, state in enumerate(seen.states):
                    self._compare(name, rank, stage, state)

    def _compare(self, name: str, rank: int, stage: int, state: Any, most: int | None = None) -> None:
        what = self._plan()[name]
        with torch.random.fork_rng(devices=[]):
            right = self.expected(steps_of(what, stage, self.world_size)[:most], self.world_size)
        if apart := _apart(state, right, self.tolerance):
            when = f"after join {stage + 1}" if stage < len(what.lengths) else "after further training without a join"
            self._broken(name, f"rank {rank} {when} differs from a single process: {apart}")

    def _throws(self, name: str) -> None:
        what = self._plan()[name]
        mode = self.options.get("mode") if what.mode == "own" else what.mode
        planned = mode in ("planned", "auto") or (mode is None and self._has_own_loop)
        steps = 0 if planned else min(what.lengths[0])
        for rank, seen in enumerate(self._seen(name)):
            if seen.kind != "uneven":
                self._broken(name, f"rank {rank} raised {seen.error or 'no error'}, not UnevenInputsError")
            if seen.done != [steps]:
                self._broken(name, f"rank {rank} stopped after {seen.done[0]} steps, expected {steps}")
            self._compare(name, rank, 0, seen.states[0], steps)

    @property
    def _has_own_loop(self) -> bool:
        return type(self).loop is not JoinableContract.loop

    def _needs_announcing(self) -> None:
        if not self.announces:
            self.skipped("announces = False: it supports neither planned nor counted mode")

    def _is_kept(self, trace: str) -> bool:
        return any(trace.endswith(f": now also {name!r}") or f".{name}:" in trace for name in self.keeps)


class MinimalJoinable(BuiltInJoinable):
    """A minimal joinable for a hook under test. It notifies ``Join`` before each step, and runs no collectives."""


class JoinHookContract(JoinableContract):
    """Tests of a join hook. Inherit as from :class:`JoinableContract`, but override :meth:`hook`, not ``joinables``.

    The hook runs in a minimal joinable, which notifies ``Join`` before each step. So :meth:`step` contains only the
    work of a rank with data, with its collectives; the hook's ``main_hook`` must run the same collectives. If the hook
    needs a specific joinable, override :meth:`joinables`, too.
    """

    def hook(self, subject: Any) -> Any:
        """Return a new instance of the hook under test, for one join."""
        raise NotImplementedError(f"{type(self).__name__} must define hook(self, subject)")

    def joinables(self, subject: Any) -> Sequence[Any]:
        """Return a minimal joinable that runs the result of :meth:`hook`."""
        joinable = MinimalJoinable()
        joinable.own_hook = lambda joinable: self.hook(subject)
        return [joinable]

    def announce(self, joinables: Sequence[Any]) -> None:
        """Notify ``Join`` that this rank has data for the next step, if the joinable is the minimal joinable."""
        for each in joinables:
            if isinstance(each, MinimalJoinable):
                notify(each)


def _apart(found: Any, right: Any, tolerance: float) -> str:
    """Return where and how two states differ, or an empty string. ``tolerance``: relative and absolute tolerance."""
    exact = tolerance == 0.0
    found, right = _as_tensors(found), _as_tensors(right)
    try:
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=exact)
    except (AssertionError, TypeError) as error:
        return " ".join(str(error).split())
    return ""


def _as_tensors(state: Any) -> Any:
    """Convert every number and list of numbers in a state to a tensor. Python numbers become float64."""
    if isinstance(state, Mapping):
        return {key: _as_tensors(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and not all(isinstance(each, (int, float)) for each in state):
        return [_as_tensors(value) for value in state]
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    return torch.as_tensor(state, dtype=torch.float64, device="cpu")
