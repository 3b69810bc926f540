"""Any loop has the numbers of a single process, or ends with an error that names the cause, on all ranks and soon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st

from stagereg.testing import run_ranks

from ..support.any_loop import Loop, apart, one_process, train_several
from ..support.examples import examples
from ..support.reference import JOINABLES

EXACT = 1e-6
BOUND_S = 10.0
CAUSES = (
    "one backward of each model in each step",  # another order of the models in a plain loop
    "after a step without a backward of",
    "no listed joinable zeroes gradients as the loop does",
    "torch.autograd.grad ran through",
    "an optimizer did not step equally often on all ranks",  # a function that counts its calls leaves out no_sync
    "called the model in step",  # FSDP2 under no_grad
    "a counter that stops on ranks that have left",  # no_sync by that count
)

OPTIONS: dict[str, list[Any]] = {
    "lengths": [(2, 5), (3, 6), (1, 4), (0, 3), (3, 3), (4, 1)],
    "epochs": [1, 2],
    "one_join": [False, True],
    "iterates": [False, True],
    "mode": ["planned", "counted", "auto", "torch"],
    "column": ["ddp", "ddp", "fsdp2"][: 2 + JOINABLES],
    "uses": [(0,), (0,), (0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 0)],
    "joint": [False, False, False, True],
    "reverse": [False, True],
    "k": [1, 1, 2, 3],
    "no_sync": [False, True],
    "listed": ["function", "function", "optimizer"],
    "zeroes": ["after", "after", "before"],
    "grad": ["", "", "penalty", "penalty last", "attack", "norms"],
    "forward": ["", "", "no_grad", "twice"],
    "compiled": [False] * 15 + [examples(100) == 100],  # a compilation takes as long as ten loops: not in `make test`
    "batch": ["tensor", "dict", "list", "tuple", "enumerate"],
    "frozen": [False, True],
}
LOOPS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()})


def possible(options: dict[str, Any]) -> Loop:
    loop = Loop(**options)
    if loop.column == "fsdp2" and "penalty" in loop.grad:  # torch's FSDP2 computes wrong second derivatives
        loop = replace(loop, grad="attack")
    return replace(loop, mode=None) if loop.iterates and loop.mode == "torch" else loop  # torch's is for plain loops


def outcome(loop: Loop, found: list[tuple[Any, float]]) -> str:
    """Hold the results of all ranks against the promise; return the kind of the result."""
    errors = [each for each, _ in found if isinstance(each, str)]
    if not errors:
        right = one_process(loop)
        assert max(apart(each, right) for each, _ in found) < EXACT, loop
        return "exact"
    assert len(errors) == 2, (loop, errors)
    assert max(seconds for _, seconds in found) < BOUND_S * (3 if loop.compiled else 1), (loop, found)
    causes = [cause for cause in CAUSES if any(cause in error for error in errors)]
    assert causes, (loop, errors)
    assert not loop.iterates, (loop, errors)
    return causes[0]


EXAMPLES = [
    {"iterates": True, "k": 2, "no_sync": True, "uses": (0, 0), "forward": "no_grad", "lengths": (3, 6), "mode": None},
    {"column": "fsdp2", "uses": (0, 0, 1), "lengths": (4, 1), "mode": "auto", "frozen": True},
    {"k": 2, "no_sync": True, "listed": "optimizer", "epochs": 2, "one_join": False},
    {"k": 2, "no_sync": True, "listed": "optimizer", "epochs": 2, "mode": "torch"},
    {"uses": (0, 1, 0), "joint": True, "lengths": (3, 6), "listed": "optimizer"},
    {"uses": (0, 0, 1), "k": 3, "no_sync": True, "mode": "torch", "listed": "optimizer"},
    {"uses": (0, 1, 0), "reverse": True, "k": 2, "lengths": (1, 4), "mode": "auto"},
    {"uses": (0, 1), "k": 3, "no_sync": True, "column": "fsdp2", "epochs": 2, "one_join": False, "mode": "auto"},
]


@pytest.mark.timeout(300)
@settings(  # 50 loops in `make test`, in lists that ranks start for once as long as there is no error; no shrinking
    max_examples=examples(20),
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(st.lists(LOOPS, min_size=5, max_size=5))
@example([{"iterates": False, **each} for each in EXAMPLES if JOINABLES or "column" not in each])
def test_a_loop_is_exact_or_refused_by_its_cause(several: list[dict[str, Any]]) -> None:
    loops = list(map(possible, several))
    while loops:
        every = run_ranks(train_several, 2, args=(loops,), timeout_s=100)
        for loop, *found in zip(loops, *every, strict=False):
            event(outcome(loop, found))
        assert len(every[0]) == len(every[1])
        loops = loops[len(every[0]) :]
