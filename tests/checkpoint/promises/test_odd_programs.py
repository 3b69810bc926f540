"""Programs with odd states, in any combination: a checkpoint gives back what the program had, or names what it cannot.

A program has a model, an optimizer and plain values, each odd in some way, and does something to its state while the
default stager copies it. What is restored has to be equal to what there was at the save; otherwise an error of the
project has to name an entry.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import stagereg
from stagereg.errors import StageregError

from ...support.subclasses import Codes, Dense, Opaque, codes, nested

SIZE = 130  # a weight above the size from which copies are deferred


class Recorder(torch.nn.Linear):
    """A layer whose extra state has a size and dtype of its own."""

    def __init__(self, extra: Any) -> None:
        super().__init__(SIZE, SIZE)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.other(self.one(x))


class WritesInForward(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.weight[3:7].clamp_(-0.01, 0.01)
        return super().forward(x)


LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "plain": lambda seed: torch.nn.Linear(SIZE, SIZE),
    "lazy": lambda seed: torch.nn.LazyLinear(SIZE),
    "extra tensor": lambda seed: Recorder(torch.arange(seed, dtype=torch.int16)),
    "extra dict": lambda seed: Recorder({"n": seed, "x": torch.rand(seed)}),
    "extra bytes": lambda seed: Recorder(b"x" * seed),
    "tied": lambda seed: Tied(),
    "writes in forward": lambda seed: WritesInForward(),
    "norm": lambda seed: torch.nn.BatchNorm1d(SIZE),
}


class Odd(torch.optim.SGD):
    """An optimizer with a state of its own under each parameter, and beside them."""

    kinds: tuple[str, ...] = ()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                for kind in self.kinds:
                    self.state[p][kind] = STATES[kind](p)
        if "own key" in self.kinds:
            self.state["global"] = {"n": len(self.param_groups), ("a", 1): torch.ones(2, dtype=torch.float64)}  # type: ignore[index]


STATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "master": lambda p: p.detach().double() + 1e-9,
    "half": lambda p: p.detach().bfloat16(),
    "transposed": lambda p: torch.rand(4, 6).t(),
    "codes": lambda p: codes(5),
    "nested": lambda p: nested(4),
    "opaque": lambda p: Opaque(torch.ones(2)),
    "set": lambda p: {"a", "b"},
    "list": lambda p: [torch.ones(3, dtype=torch.int64), None, 1.5, (2, "x")],
    "empty": lambda p: torch.empty(0, 3),
    "own key": lambda p: 1,
}

VALUES: dict[str, Callable[[], Any]] = {
    "views": lambda: (lambda x: {"all": x, "part": x[1:3], "column": x[:, 0]})(torch.rand(4, 5)),
    "expanded": lambda: torch.ones(3, 1).expand(3, 4),
    "codes": lambda: codes(4),
    "dense": lambda: torch.rand(3).as_subclass(Dense),
    "config": lambda: OmegaConf.create({"lr": 0.1, "list": [1, "${lr}"]}),
    "generator": lambda: torch.Generator().manual_seed(int(random.random() * 1e6)),
    "nothing": lambda: None,
}


def resize(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)


EVENTS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda x: None,
    "replaced": lambda x: setattr(x, "data", torch.full_like(x, 7.0)),
    "freed": resize,
    "grown": lambda x: x.resize_(4 * SIZE, SIZE),
    "shared": lambda x: x.share_memory_(),
    "written": lambda x: x[5].fill_(7.0),
}


class Program:
    def __init__(self, layers: list[str], states: list[str], values: list[str], seed: int, groups: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(LAYERS[kind](seed) for kind in layers))
        first = [*self.model.parameters()]
        parts: list[dict[str, Any]] = [{"params": first}, *({"params": [], "lr": seed / 10} for _ in range(groups))]
        self.optimizer = Odd(parts, lr=0.01, momentum=0.9)
        self.optimizer.kinds = tuple(states)
        self.values = {kind: VALUES[kind]() for kind in values}
        self.state = {"nets": {"model": self.model}, "optimizer": self.optimizer, "values": self.values}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(4, SIZE)).square().mean().backward()
        self.optimizer.step()

    def snapshot(self) -> dict[str, Any]:
        torchs = self.optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": torchs, "values": dict(self.values)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Generator):
        return isinstance(other, torch.Generator) and torch.equal(one.get_state(), other.get_state())
    if isinstance(one, Codes):
        return type(one) is type(other) and same(one.codes, other.codes) and same(one.scale, other.scale)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and (type(one) is type(other) or isinstance(one, torch.nn.Parameter))


def copied(x: Any) -> Any:
    """Return a copy of a snapshot that shares nothing with the program; nothing can copy an ``Opaque``."""
    if isinstance(x, Opaque):
        return x
    if isinstance(x, torch.Generator):
        return x.clone_state()
    if isinstance(x, dict):
        return {key: copied(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(copied, x))
    return x.detach().clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x)


def chosen(kinds: dict[str, Any], most: int) -> Any:
    return st.lists(st.sampled_from([*kinds]), max_size=most, unique=True)


@settings(max_examples=40)
@given(
    layers=st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=3),
    states=chosen(STATES, 3),
    values=chosen(VALUES, 2),
    event=st.sampled_from([*EVENTS]),
    groups=st.integers(0, 2),
    lazily=st.booleans(),
)
@example(["plain"], [], [], "freed", 0, False)
@example(["writes in forward"], ["master", "own key"], ["views"], "written", 1, False)
@example(["lazy", "extra tensor"], ["codes", "transposed"], ["codes", "config"], "replaced", 2, True)
def test_what_a_program_had_comes_back_or_an_error_names_it(
    layers: list[str], states: list[str], values: list[str], event: str, groups: int, lazily: bool
) -> None:
    program = Program(layers, states, values, seed=3, groups=groups)
    try:
        if "lazy" in layers:
            program.model(torch.rand(4, SIZE))
            program.optimizer = Odd(program.model.parameters(), lr=0.01, momentum=0.9)
            program.optimizer.kinds = tuple(states)
            program.state["optimizer"], groups = program.optimizer, 0
        for _ in range(2):
            program.step()
    except NotImplementedError:  # torch itself refuses
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with stagereg.Checkpointer(folder, every=1, save_last=False) as checkpointer:
                program.step()  # so that the optimizer is known
                program.step()
                expected = copied(program.snapshot())
                checkpointer.save(1, program.state)
                momentum = [
                    each["momentum_buffer"] for each in program.optimizer.state.values() if "momentum_buffer" in each
                ]
                with torch.no_grad():
                    written = [x for x in momentum if x.ndim == 2 or event in ("none", "freed", "shared")]
                    assume(written)  # a program of norms alone has no momentum of two dimensions
                    EVENTS[event](written[0])
            other = Program(layers, states, values, seed=5, groups=groups)
            if "lazy" in layers and not lazily:
                other.model(torch.rand(4, SIZE))
            with stagereg.Checkpointer(folder, every=1, save_last=False) as checkpointer:
                if checkpointer.restore(other.state) is None:
                    assert event != "none"  # the save was discarded, and no later one came
                    return
        except StageregError as error:
            text = str(error)
            assert any(name in text for name in ("model", "optimizer", "values")), text
            return
        assert same(other.snapshot(), expected)
