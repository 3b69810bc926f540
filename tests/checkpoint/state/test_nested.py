"""Objects in containers of a state are saved and restored as the objects that they are."""

from __future__ import annotations

import collections
import random
import types
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, ReduceLROnPlateau, SequentialLR

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.state.nested import Spreader
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.testing.ranks import run_ranks
from tests.support.reading import opened

Pair = namedtuple("Pair", "left right")


class Counting:
    """An object with a state of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def save(path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(path, every=1) as c:
        c.save(1, state)


def restore(path: Path, state: Any, **more: Any) -> Any:
    with Checkpointer(path, every=1, **more) as c:
        c.restore(state)
    return state


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as error:
        act()
    assert not isinstance(error.value, CorruptCheckpointError)
    return str(error.value)


# -- the same state, whatever its containers are

KEYS = st.sampled_from(["a", "b", "c", "stage"])
PLAIN = st.one_of(st.integers(-5, 5), st.text("xyz", max_size=3), st.none(), st.lists(st.integers(0, 3), max_size=2))
COUNTING = st.builds(Counting, st.integers(0, 9))


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some = st.lists(inner, min_size=1, max_size=3)
        pairs = st.builds(Pair, COUNTING, inner)  # one without an object in it is refused
        return st.one_of(some, some.map(tuple), pairs, st.dictionaries(KEYS, inner, min_size=1, max_size=3))

    return st.recursive(leaf, containers, max_leaves=6)


def map_tree(tree: Any, act: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: map_tree(item, act) for key, item in tree.items()}
    if isinstance(tree, Pair):
        return Pair(*(map_tree(item, act) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(item, act) for item in tree)
    return act(tree)


def other(leaf: Any) -> Any:
    return Counting(-1) if isinstance(leaf, Counting) else "of the program"


def shown(leaf: Any) -> Any:
    return leaf.count if isinstance(leaf, Counting) else leaf


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, trees(st.one_of(PLAIN, COUNTING)), min_size=1, max_size=3))
def test_every_object_and_value_comes_back_wherever_it_is(tmp_path_factory: Any, saved: dict[str, Any]) -> None:
    path, program = tmp_path_factory.mktemp("run"), map_tree(saved, other)
    own: list[Any] = []
    map_tree(program, own.append)
    save(path, saved)
    restore(path, program)
    assert map_tree(program, shown) == map_tree(saved, shown)
    now: list[Any] = []
    map_tree(program, now.append)
    mine = [each for each in own if isinstance(each, Counting)]
    assert [id(each) for each in now if isinstance(each, Counting)] == [*map(id, mine)]  # the program's own objects


def net(value: float) -> torch.nn.Module:
    made = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(made.weight, value)
    return made


def training(value: float, steps: int = 0) -> dict[str, Any]:
    nets = {"g": net(value), "d": net(value + 1)}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in nets.values()]
    first, second = (ExponentialLR(each, 0.5) for each in optimizers)
    for _ in range(steps):
        for each, optimizer in zip(nets.values(), optimizers, strict=True):
            each(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        first.step()
        second.step()
    train = {"opt": {"g": optimizers[0], "d": optimizers[1]}, "epoch": steps, "history": torch.full((3,), value)}
    return {"nets": nets, "train": train, "schedulers": [first, second]}


def test_a_run_continues_from_nested_objects_as_from_named_ones(tmp_path: Path) -> None:
    saved, program = training(1.0, steps=2), training(5.0)
    history, containers = program["train"]["history"], program["train"]
    save(tmp_path, saved)
    restore(tmp_path, program)
    assert program["train"] is containers
    assert containers["history"] is history
    for state in saved, program:
        for each, optimizer in zip(state["nets"].values(), state["train"]["opt"].values(), strict=True):
            optimizer.zero_grad()
            each(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert [x.tolist() for x in program["nets"]["g"].parameters()] == [
        x.tolist() for x in saved["nets"]["g"].parameters()
    ]
    assert [each.last_epoch for each in program["schedulers"]] == [2, 2]
    assert program["train"]["epoch"] == 2
    with opened(tmp_path) as checkpoint:
        assert checkpoint["nets.g.weight"].shape == (2, 2)
        assert {"train.opt.g", "train.epoch", "schedulers.1"} <= {*checkpoint.entries}


def test_lists_of_modules_and_of_optimizers_stay_one_entry(tmp_path: Path) -> None:
    stages = [
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
        torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 2)),
    ]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in stages]
    save(tmp_path, {"nets": {"stages": stages}, "train": {"opt": optimizers, "n": 1}})
    with opened(tmp_path) as checkpoint:
        assert sorted(checkpoint.entries) == ["nets.stages", "train.n", "train.opt"]


def test_a_checkpoint_with_a_plain_container_restores_objects_in_it(tmp_path: Path) -> None:
    model = net(7.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    save(tmp_path, {"train": {"model": model.state_dict(), "opt": [optimizer.state_dict(), 0], "epoch": 4}, "old": {}})
    mine = net(1.0)
    state = {"train": {"model": mine, "opt": [torch.optim.SGD(mine.parameters(), lr=0.1), 9], "epoch": 0}}
    restore(tmp_path, state)
    assert torch.equal(mine.weight, model.weight)
    assert state["train"]["opt"][0].param_groups[0]["lr"] == 0.3
    assert (state["train"]["opt"][1], state["train"]["epoch"]) == (0, 4)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    text = refused(lambda: save(tmp_path, {"nets.g": net(1), "nets": {"g": net(2)}}))
    assert "two entries 'nets.g'" in text
    assert "another name" in text


def test_missing_entries_and_per_rank_go_by_the_dotted_name(tmp_path: Path) -> None:
    save(tmp_path, {"a": {"n": Counting(3), "mine": stagereg.per_rank([1])}})
    state = {"a": {"n": Counting(0), "more": Counting(8), "mine": stagereg.per_rank([])}}
    assert "The checkpoint has no 'a.more'" in refused(lambda: restore(tmp_path, state))
    restore(tmp_path, state, restore=stagereg.Restore(allow_missing=["a.more"]))
    assert (state["a"]["n"].count, state["a"]["more"].count, state["a"]["mine"].value) == (3, 8, [1])


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "set": lambda x: {"in": {x}},
    "deque": lambda x: deque([x]),
    "ChainMap": lambda x: collections.ChainMap({"x": x}),
    "UserDict": lambda x: {"in": collections.UserDict(x=x)},
    "object": lambda x: types.SimpleNamespace(x=[x]),
    "per_rank": lambda x: stagereg.per_rank([x, 1]),
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("allowed", [False, True])
def test_an_object_that_a_restore_cannot_reach_is_refused(
    hide: Callable[[Any], Any], allowed: bool, tmp_path: Path
) -> None:
    with torch.serialization.safe_globals(
        [Counting, types.SimpleNamespace, collections.UserDict, deque] if allowed else []
    ):
        text = refused(lambda: save(tmp_path, {"hidden": hide(Counting(1))}))
    assert "'hidden" in text
    assert "name of its own" in text
    assert "add_safe_globals" not in text


def test_a_large_plain_container_is_not_searched_at_each_step() -> None:
    class Seldom(list):  # type: ignore[type-arg]
        searches = 0

        def __iter__(self) -> Any:
            Seldom.searches += 1
            return super().__iter__()

    spreader, large, model = Spreader(), Seldom(range(1000)), net(1)
    spreader.spread({"large": large, "nets": {"m": model}})
    first, Seldom.searches = Seldom.searches, 0
    for _ in range(10):
        spreader.spread({"large": large, "nets": {"m": model}}, again=False)
    assert (first > 0, Seldom.searches) == (True, 0)


def test_an_object_that_came_into_a_container_later_is_saved(tmp_path: Path) -> None:
    state: dict[str, Any] = {"all": [1]}
    with Checkpointer(tmp_path, every=1) as c:
        c.maybe_save(1, state)
        state["all"].append(Counting(5))
        c.maybe_save(2, state)
    mine = Counting(0)
    restore(tmp_path, {"all": [0, mine]})
    assert mine.count == 5


def test_a_dict_that_shrinks_between_steps_is_saved_as_it_is(tmp_path: Path) -> None:
    state: dict[str, Any] = {"all": {"a": Counting(1), "b": Counting(2)}, "list": [Counting(3), Counting(4)]}
    with Checkpointer(tmp_path, every=2) as c:
        for step in range(1, 5):
            c.maybe_save(step, state)
            if step == 2:
                del state["all"]["b"], state["list"][1]
    with opened(tmp_path) as checkpoint:
        assert sorted(checkpoint.entries) == ["all.a", "list.0"]


# -- schedulers


def schedulers(optimizer: Any) -> dict[str, Any]:
    def few() -> list[Any]:
        return [ConstantLR(optimizer, 0.5, 3), ExponentialLR(optimizer, 0.9)]

    inner = SequentialLR(optimizer, few(), [2])
    return {
        "chained": ChainedScheduler(few()),
        "sequential": SequentialLR(optimizer, few(), [2]),
        "chained in sequential": SequentialLR(optimizer, [inner, ExponentialLR(optimizer, 0.8)], [3]),
        "plateau": ReduceLROnPlateau(optimizer, patience=0),
    }


@pytest.mark.parametrize("kind", ["chained", "sequential", "chained in sequential", "plateau"])
def test_schedulers_with_others_in_them_continue(kind: str, tmp_path: Path) -> None:
    def program() -> dict[str, Any]:
        optimizer = torch.optim.SGD(net(1).parameters(), lr=0.1)
        return {"optimizer": optimizer, "scheduler": schedulers(optimizer)[kind]}

    def advance(state: dict[str, Any], steps: int) -> list[float]:
        more = (1.0,) if kind == "plateau" else ()
        rates = []
        for _ in range(steps):
            state["optimizer"].step()
            state["scheduler"].step(*more)
            rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    saved, mine = program(), program()
    advance(saved, 4)
    save(tmp_path, saved)
    restore(tmp_path, mine)
    assert advance(mine, 4) == advance(saved, 4)


# -- generators

GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand(3, generator=g).tolist()),
    "numpy": (np.random.default_rng, lambda g: g.random(3).tolist()),
    "MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.random(3).tolist()),
    "RandomState": (np.random.RandomState, lambda g: g.randn(3).tolist()),
    "random": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_program_continues_in_place(kind: str, tmp_path: Path) -> None:
    make, draw = GENERATORS[kind]
    saved, mine = make(1), make(2)
    draw(saved)
    save(tmp_path, {"gen": saved, "more": {"gen": saved}})
    inner = make(3)
    restore(tmp_path, {"gen": mine, "more": {"gen": inner}})
    expected = draw(saved)
    assert draw(mine) == expected
    assert draw(inner) == expected


def test_a_generator_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, {"gen": torch.Generator()})
    before, mine = random.Random(1).random(), random.Random(1)
    text = refused(lambda: restore(tmp_path, {"gen": mine}))
    assert "'gen'" in text
    assert "another kind of generator: expected 'random', got 'torch cpu'" in text
    assert mine.random() == before


def save_and_restore_on_ranks(rank: int, world_size: int, path: str) -> None:
    generator = torch.Generator().manual_seed(rank)
    with Checkpointer(path, every=1) as c:
        c.save(1, {"gen": generator, "nets": {"m": net(1)}, "sched": [Counting(4), stagereg.per_rank(rank)]})
    mine, counting, own = torch.Generator(), Counting(0), stagereg.per_rank(-1)
    with Checkpointer(path, every=1) as c:
        c.restore({"gen": mine, "nets": {"m": net(3)}, "sched": [counting, own]})
    assert torch.equal(mine.get_state(), generator.get_state())
    assert (counting.count, own.value) == (4, rank)


def test_each_rank_gets_its_own_of_what_is_in_containers(tmp_path: Path) -> None:
    run_ranks(save_and_restore_on_ranks, nproc=2, args=(str(tmp_path),))


def test_plain_values_beside_objects_come_back_where_the_program_has_none_yet(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "train": {"m": net(1), "old": net(5), "best": 0.5, "more": {"sched": Counting(2), "seen": {"a": [1]}}}
    }
    save(tmp_path, saved)
    train = restore(tmp_path, {"train": {"m": net(3)}})["train"]
    assert (train["best"], train["more"]["seen"]) == (0.5, {"a": [1]})
    assert "old" not in train
    assert torch.equal(train["m"].weight, saved["train"]["m"].weight)


def test_a_plain_value_that_its_container_cannot_take_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, {"train": [net(1), Counting(2), 0.5]})
    assert "'train.2' was saved" in refused(lambda: restore(tmp_path, {"train": [net(3), Counting(0)]}))


def test_modules_of_one_name_are_refused_with_the_name_of_their_entry(tmp_path: Path) -> None:
    assert "'nets': Two of its modules have" in refused(lambda: save(tmp_path, {"nets": [net(1), net(1)]}))
