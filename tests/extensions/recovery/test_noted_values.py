"""An emergency save has every value as it was when the step ended, whatever its type, or the step is not saved."""

from __future__ import annotations

import copy
import enum
import fractions
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

from stagereg.checkpoint.state.entries import per_rank
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.errors import CheckpointError
from stagereg.extensions.recovery.end_of_step import Notes
from stagereg.extensions.recovery.step_snapshot import StepSnapshot
from tests.support.subclasses import codes


@dataclass
class Metrics:
    seen: int = 0
    losses: list[float] = field(default_factory=list)


class Color(enum.Enum):
    RED = 1


class Count(int):
    """A number with an attribute."""


class Stateful:
    """An object that returns its live state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Loader(Stateful):
    """A data loader that returns its live position."""

    def __iter__(self) -> Any:
        return iter(())

    def load_state_dicts(self, states: Any, own: int | None) -> None: ...


def number(start: int) -> Count:
    made = Count(start)
    made.history = [start]  # type: ignore[attr-defined]
    return made


CHANGING = {
    "list": lambda: [1],
    "dict": lambda: {"a": 1},
    "ordered": lambda: OrderedDict(a=1, b=torch.zeros(3)),
    "module state": lambda: nn.BatchNorm1d(2).state_dict(),
    "counter": lambda: Counter(a=1),
    "defaultdict": lambda: defaultdict(int, a=1),
    "deque": lambda: deque([1, 2], 5),
    "set": lambda: {1},
    "bytearray": lambda: bytearray(b"ab"),
    "array": lambda: numpy.zeros(3),
    "objects": lambda: numpy.array([[1], [2]], dtype=object),
    "tensor": lambda: torch.zeros(3),
    "parameter": lambda: nn.Parameter(torch.zeros(3)),
    "conjugate": lambda: torch.zeros(3, dtype=torch.cfloat).conj(),
    "wrapper": lambda: codes(2, 3),
    "memory of NumPy": lambda: torch.from_numpy(numpy.zeros(3)),
    "storage": lambda: torch.zeros(3).untyped_storage(),
    "dataclass": lambda: Metrics(),
    "number": lambda: number(3),
    "tuple": lambda: ([1], torch.zeros(2), Metrics()),
    "stateful": lambda: Stateful({"n": [1]}),
    "loader": lambda: Loader({"n": [1]}),
    "per rank": lambda: per_rank(Counter(a=1)),
}
"""Small values of each type that code can change in place."""
LARGE = {
    "tensor": lambda: torch.zeros(40_000),
    "parameter": lambda: nn.Parameter(torch.zeros(40_000)),
    "ordered": lambda: OrderedDict(a=torch.zeros(40_000)),
    "tuple": lambda: (torch.zeros(40_000),),
    "dataclass": lambda: Metrics(losses=torch.zeros(40_000)),  # type: ignore[arg-type]
    "array": lambda: numpy.zeros(40_000),
    "wrapper": lambda: codes(200, 400),
}
FIXED = [1, 2.5, "text", b"bytes", None, True, 1j, Color.RED, fractions.Fraction(1, 3), numpy.float32(2), torch.float16]


def change(value: Any) -> None:
    """Change a value and all values inside it in place, as far as their types permit."""
    match value:
        case torch.UntypedStorage():
            value.fill_(7)
        case torch.Tensor() if hasattr(value, "scale"):
            value.scale.add_(7)
        case torch.Tensor():
            with torch.no_grad():
                value.add_(7)
        case numpy.ndarray() if value.dtype == object:
            for item in value:
                change(item)
        case numpy.ndarray():
            value += 7
        case dict():
            for item in value.values():
                change(item)
            value["new"] = 5
        case list() | deque() | tuple():
            for item in value:
                change(item)
            if not isinstance(value, tuple):
                value.append(9)
        case set():
            value.add(9)
        case bytearray():
            value += b"z"
    for item in getattr(value, "__dict__", {}).values():
        if not isinstance(value, (torch.Tensor, torch.UntypedStorage, enum.Enum, fractions.Fraction)):
            change(item)
    if isinstance(value, Metrics):
        value.seen += 7


def content(value: Any) -> Any:
    """Return the content of a value as plain tuples, which compare equal if the values are equal."""
    kind = type(value).__name__
    match value:
        case torch.UntypedStorage():
            return kind, bytes(value)
        case torch.Tensor() if hasattr(value, "scale"):
            return kind, content(value.codes), content(value.scale)
        case torch.Tensor():
            return value.dtype, str(value.tolist())
        case numpy.ndarray():
            return kind, str(value.tolist())
        case dict():
            return kind, [(key, content(item)) for key, item in value.items()], content([*vars_of(value).items()])
        case list() | tuple() | deque() | set() | frozenset():
            return kind, [content(item) for item in value]
    return kind, repr(value), content([*vars_of(value).items()]) if vars_of(value) else None


def vars_of(value: Any) -> dict[str, Any]:
    return {} if isinstance(value, (enum.Enum, type, fractions.Fraction)) else getattr(value, "__dict__", {})


class Run:
    """A step that was recorded with an entry ``value``."""

    def __init__(self, value: Any, model: nn.Module | None = None, **more: Any) -> None:
        self.model = model or nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.whole = StepSnapshot(ParameterNames())
        self.whole._guard.close()  # otherwise, a failed test would block the optimizers of the next tests
        self.state = {"model": self.model, "optimizer": self.optimizer, "value": value, **more}
        self.whole.note(1, self.state)

    def taken(self) -> Any:
        """Return the saved value. Raises: ``CheckpointError`` if the step is not saved."""
        if why := self.whole.hold():
            raise CheckpointError(why)
        taken = self.whole.take(0, 1)
        self.whole.expect_unchanged()
        return taken["value"] if "value" in taken else taken["value.rank0"]


def saved_form(value: Any) -> Any:
    value = value.value if hasattr(value, "value") and not isinstance(value, enum.Enum) else value
    return value.state_dict() if isinstance(value, Stateful) else value


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("inside", [lambda x: x, lambda x: [x], lambda x: {"a": {"b": x}}])
def test_a_small_value_of_any_type_is_saved_as_it_was_when_the_step_ended(kind: str, inside: Any) -> None:
    value = CHANGING[kind]()
    is_entry = isinstance(value, Stateful) or kind == "per rank"
    before = content(saved_form(copy.deepcopy(value)))
    run = Run(value if is_entry else inside(value))
    change(value.value if kind == "per rank" else value)
    found = run.taken()
    if not is_entry:
        found = found[0] if isinstance(found, list) and inside([1]) == [[1]] else found
        found = found["a"]["b"] if inside(1) == {"a": {"b": 1}} else found
    if kind == "wrapper":
        assert torch.equal(found.scale, CHANGING[kind]().scale)
    assert content(found) == before


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_value_is_saved_if_nothing_changes_it_and_never_after_a_change(kind: str) -> None:
    value = LARGE[kind]()
    before = content(copy.deepcopy(value))
    assert content(Run(value).taken()) == before
    run = Run(value)
    change(value)
    try:
        found = run.taken()
    except CheckpointError:
        return
    assert content(found) == before


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items, named = st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    kinds = [items.map(tuple), items.map(deque), named.map(OrderedDict), named.map(lambda x: defaultdict(list, x))]
    return st.one_of(items, named, *kinds, items.map(lambda x: Metrics(losses=x)))


PLAIN = [kind for kind in CHANGING if kind not in ("stateful", "loader", "per rank", "wrapper")]
LEAVES = st.sampled_from(FIXED) | st.sampled_from(PLAIN).map(lambda kind: CHANGING[kind]())
LEAVES |= st.sampled_from(["tensor", "parameter", "ordered"]).map(lambda kind: LARGE[kind]())


@settings(max_examples=100, deadline=None)
@given(st.recursive(LEAVES, nested, max_leaves=8))
def test_no_saved_value_has_a_change_that_was_made_after_the_step(value: Any) -> None:
    before = content(copy.deepcopy(value))
    run = Run(value)
    assert content(value) == before
    change(value)
    try:
        found = run.taken()
    except CheckpointError:  # a large tensor was changed
        return
    assert content(found) == before


@settings(max_examples=50, deadline=None)
@given(st.recursive(LEAVES, nested, max_leaves=8))
def test_each_value_that_nothing_changes_is_saved(value: Any) -> None:
    assert content(Run(value).taken()) == content(value)


@pytest.mark.parametrize("kind", ["tensor", "parameter"])
@pytest.mark.parametrize("values", [CHANGING, LARGE])
def test_recording_a_tensor_leaves_the_attributes_of_the_program_alone(kind: str, values: Any) -> None:
    x = values[kind]()
    x.tag = tag = [1]
    run = Run((x, Metrics(losses=x)))
    assert x.tag is tag
    run.taken()
    assert x.tag is tag


@pytest.mark.parametrize("first", [0, "text", torch.zeros(1)])
def test_every_item_of_a_long_container_is_checked(first: Any) -> None:
    for value in ([first, *([0] for _ in range(1100))], {i: {i} if i else first for i in range(1101)}):
        with pytest.raises(CheckpointError, match=r"1,(101|024) items"):
            Run(value).taken()
    for flat in ([0, "text", None] * 400, dict.fromkeys(range(1101))):
        before = copy.copy(flat)
        run = Run(flat)
        flat.clear()
        assert run.taken() == before


def test_values_that_take_long_to_copy_in_total_are_refused_with_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr("time.thread_time", lambda: 0.003 * next(times))
    assert Notes().of([{1}, {2}, {3}]) == [{1}, {2}, {3}]
    with pytest.raises(CheckpointError, match=r"copying values such as a set takes 0\.012 s, which is slow"):
        Notes().of([{1}, {2}, {3}, {4}])


def test_a_thousand_numbers_of_numpy_cost_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.thread_time", lambda: pytest.fail("copied"))
    numbers = [numpy.float64(1), numpy.float32(2), numpy.int64(3), numpy.bool_(True)] * 250
    assert Notes().of(numbers) == numbers


def test_a_config_is_copied_once_and_a_step_after_its_change_is_not_saved() -> None:
    config = OmegaConf.create({"a": {"b": 1}, "same": "${a.b}", "missing": "???"})
    run = Run(config, more=[config.a])
    first = run.whole._ends[-1]._noted["value"]
    run.whole.note(2, run.state)
    assert run.whole._ends[-1]._noted["value"] is first
    assert run.taken() == config
    config.a.b = 2
    with pytest.raises(CheckpointError, match="code has changed a config in its state"):
        run.taken()


def test_an_option_of_an_optimizer_is_saved_as_it_was_when_the_step_ended() -> None:
    run = Run(1)
    [group] = run.optimizer.param_groups
    group["bounds"] = bounds = {"low": [1.0]}
    run.whole.note(2, run.state)
    bounds["low"].append(2.0)
    run.taken()
    groups = run.whole.take(0, 1)["optimizer"]["param_groups"]
    assert {str(each["bounds"]) for each in groups.values()} == {"{'low': [1.0]}"}


def test_buffers_that_share_memory_with_their_conjugate_keep_their_own_values() -> None:
    model, x = nn.Linear(2, 2), torch.randn(3, dtype=torch.cfloat)
    for name, each in {"x": x, "conj": x.conj(), "imag": x.conj().imag}.items():
        model.register_buffer(name, each)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    run = Run(1, model)
    x += 1 + 1j  # as in a forward pass
    run.taken()
    found = run.whole.take(0, 1)["model"]
    assert all(torch.equal(found[name], each) for name, each in before.items())
