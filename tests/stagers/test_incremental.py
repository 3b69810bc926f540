"""Incremental: what did not change is shared, what did is copied, and a wrong declaration is found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stagereg.errors import StagingError
from stagereg.kernel.state_dict import flatten
from stagereg.stagers.incremental import IncrementalStager, names_of
from stagereg.testing import run_ranks

from ..support import states
from ..support.examples import examples
from .test_properties import tensors

build = functools.partial(states.build, "incremental")


def at(x: torch.Tensor) -> int:
    return x.data_ptr()


def adapted() -> dict[str, Any]:
    """A frozen base under an adapter, large and small tensors of both."""
    base = {"w": torch.randn(600, 600), "b": torch.randn(5), "n": torch.tensor(7)}
    adapter = {"w": torch.randn(100, 20), "s": torch.tensor(1.5)}
    return {"model": {"base": base, "adapter": adapter}, "step": 1}


class TestDeclared:
    def test_frozen_tensors_are_copied_once_until_replaced(self) -> None:
        state, stager = adapted(), build(frozen=["model.base.*"])
        first = {name: at(x) for name, x in stager.stage(state)["model"]["base"].items()}  # and the copy is dropped
        copies = []
        for step in range(4):
            state["model"] = {"base": dict(state["model"]["base"]), "adapter": {"w": torch.full((9,), float(step))}}
            state[f"more {step}"] = [torch.ones(2)]
            copies.append(stager.stage(state))
        for name, source in state["model"]["base"].items():
            assert {at(copy["model"]["base"][name]) for copy in copies} == {first[name]}, name
            assert at(source) != first[name]
            assert torch.equal(source, copies[3]["model"]["base"][name])
        assert [int(copy["model"]["adapter"]["w"].mean()) for copy in copies] == [0, 1, 2, 3]
        base = state["model"]["base"]
        base["w"] = base["w"].t()
        replaced = stager.stage(state)["model"]["base"]
        assert torch.equal(replaced["w"], base["w"])
        assert [at(replaced[name]) == first[name] for name in "wbn"] == [False, True, True]

    @pytest.mark.parametrize(
        ("frozen", "before", "after", "moved"), [("a", "ax by", "bx ay", "b"), ("b", "ax by cx", "ax bx cy", "c")]
    )
    def test_names_that_move_to_other_tensors_are_noticed(
        self, frozen: str, before: str, after: str, moved: str
    ) -> None:
        tensors = {"x": torch.zeros(4), "y": torch.zeros(4)}
        stager = build(frozen=[frozen])
        stager.stage({name: tensors[which] for name, which in before.split()})
        tensors["x"].fill_(1)
        tensors["y"].fill_(2)
        copy = stager.stage({name: tensors[which] for name, which in after.split()})
        assert torch.equal(copy[moved], tensors[dict(after.split())[moved]]), "its name is not frozen any more"

    def test_a_pattern_that_matches_nothing_names_the_nearest(self) -> None:
        for frozen, message in (
            (["model.bse.*"], r"'model\.bse\.\*' .*matches no tensor.*Did you mean 'model\.base\.\*'"),
            (["model.adapter.*", "model.base.W"], r"Did you mean 'model\.base\.w'"),
        ):
            with pytest.raises(StagingError, match=message):
                build(frozen=frozen).stage(adapted())
        state, stager = adapted(), build(frozen=["model.base.*"])
        stager.stage(state)
        with pytest.raises(StagingError, match="has none"):
            stager.stage({"step": 1})
        assert torch.equal(stager.stage(state)["model"]["base"]["w"], state["model"]["base"]["w"]), "it matches again"

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [({"frozen": "model.*"}, r"list of patterns.*\['model\.\*'\]"), ({"detect": "hash"}, "detect")],
    )
    def test_wrong_options_are_refused(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(StagingError, match=message):
            IncrementalStager(**wrong)


class TestTies:
    def test_frozen_ones_are_shared_with_ties_without_neighbours(self) -> None:
        flat = torch.zeros(1030)
        w = flat[:1000].view(50, 20)
        state = {"embed": w, "head": w.t(), "row": w[3], "later": w[9], "neighbour": flat[1000:]}
        stager = build(frozen=["embed"], verify=True)
        one = stager.stage(state)
        state["neighbour"].fill_(1)
        two = stager.stage(state)
        for copy in (one, two):
            assert at(copy["head"]) == at(copy["embed"])
            for name in ("row", "later"):
                assert at(copy[name]) - at(copy["embed"]) == at(state[name]) - at(w)
            assert torch.equal(copy["head"], w.t())
        assert at(one["embed"]) == at(two["embed"])
        assert (one["neighbour"].sum(), two["neighbour"].sum()) == (0, 30)

    def test_a_frozen_part_of_a_trained_tensor_is_copied_with_it(self) -> None:
        w = torch.zeros(100)
        state, stager = {"all": w, "part": w[:10]}, build(frozen=["part"], verify=True)
        stager.stage(state)
        w.fill_(1)
        two = stager.stage(state)
        assert two["part"].eq(1).all()
        assert at(two["all"]) == at(two["part"])

    def test_holes_that_others_write_do_not_count_as_a_change(self) -> None:
        grid = torch.zeros(8, 3)
        state, stager = {"column": grid[:, 0]}, build(frozen=["column"], verify=True)
        one = stager.stage(state)
        grid[:, 1].fill_(1)
        assert at(stager.stage(state)["column"]) == at(one["column"])
        grid[5, 0] = 1
        with pytest.raises(StagingError, match="column"):
            stager.stage(state)


class TestVerify:
    def test_a_wrong_declaration_is_named_the_stager_stays_usable(self, caplog: Any) -> None:
        state, stager = adapted(), build(frozen=["model.base.*"], verify=True, max_in_flight=1)
        base = state["model"]["base"]
        copy = stager.stage(state)["model"]["base"]["b"]
        first = at(copy)
        copy[4] += 1
        with pytest.raises(StagingError, match="a reader wrote into its copy"):
            stager.stage(state)
        copy[4] -= 1
        del copy
        base["b"].data[4] += 1
        for _ in range(2):
            with pytest.raises(
                StagingError, match=r"model\.base\.b.*declared frozen.*take it out of 'frozen'"
            ) as caught:
                stager.stage(state)
            assert caught.value.path == ("model", "base", "b")
        base["b"].data[4] -= 1
        assert at(stager.stage(state)["model"]["base"]["b"]) == first
        base["b"].data[4] += 1
        stager.forget()
        assert torch.equal(stager.stage(state)["model"]["base"]["b"], base["b"])
        assert "still held" not in caplog.text

    def test_one_bit_is_enough(self) -> None:
        w = torch.zeros(2**23 + 1, dtype=torch.uint8)  # compared in chunks of 2**22
        stager = build(frozen=["w"], verify=True)
        stager.stage({"w": w})
        for i in (0, 2**22 - 1, 2**22, 2**23 - 1, 2**23):
            w[i] = 1
            with pytest.raises(StagingError):
                stager.stage({"w": w})
            w[i] = 0
        stager.stage({"w": w})


class TestContent:
    def test_equal_tensors_are_shared_and_different_ones_copied(self) -> None:
        large = {name: torch.randn(2**20) for name in "abc"}
        stager = build(detect="content")
        one = stager.stage(large)
        large["a"].mul_(1)  # moves a version counter, and changes nothing
        large["b"][-1] += 1
        two = stager.stage(large)
        assert [at(one[n]) == at(two[n]) for n in "abc"] == [True, False, True]
        assert torch.equal(two["b"], large["b"])
        assert one["b"][-1] != two["b"][-1]

    def test_bits_count_and_not_values(self) -> None:
        x = torch.tensor([0.0, float("nan")])
        stager = build(detect="content")
        one = stager.stage({"x": x})
        assert at(stager.stage({"x": x})["x"]) == at(one["x"]), "a nan equals itself bit by bit"
        x[0] = -0.0
        assert stager.stage({"x": x})["x"].signbit()[0]

    def test_a_reader_that_writes_into_its_copy_harms_no_later_one(self) -> None:
        for n in (10, 2**21):
            x = torch.zeros(n)
            stager = build(detect="content")
            stager.stage({"x": x})["x"][n // 2] = 7
            assert stager.stage({"x": x})["x"].eq(0).all()


def test_each_tensor_has_a_name_for_each_key_and_cycles_end() -> None:
    class Lazy(dict[str, Any]):
        def items(self) -> Any:
            return [(key, torch.ones(2)) for key in self]

    x, y, z = torch.ones(2), torch.nn.Parameter(torch.ones(3)), torch.ones(2, dtype=torch.complex64).conj()
    state: dict[Any, Any] = {"a": x, "b": [y, {"c": x}], 3: (z,)}
    state["again"] = state
    names = names_of(state, flatten(state).tensors)
    assert names == [["a", "b.1.c"], ["b.0"], ["3.0"]]
    state["lazy"] = Lazy(d=1, e=2)
    assert len(names_of(state, flatten(state).tensors)) == 5


def freeze_a_dtensor(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    w = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    stager = build(frozen=["w"])
    one, two = stager.stage({"w": w}), stager.stage({"w": w})
    assert at(one["w"].to_local()) == at(two["w"].to_local())
    assert torch.equal(two["w"].to_local(), w.to_local())


def write_by_collectives(rank: int, world_size: int) -> None:
    """Each leaves the counter of some tensor as it was; content is compared, so the copy is right."""
    stager = build(detect="content")
    x = torch.zeros(2000)
    for write in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True).wait(),
        lambda: dist.broadcast(x, 1),
        lambda: dist.reduce(x, 0),
    ):
        x.data.fill_(rank + 1.0)
        stager.stage({"x": x})
        version = x._version
        write()
        assert x._version == version
        assert torch.equal(stager.stage({"x": x})["x"], x)


def check_on_ranks(rank: int, world_size: int) -> None:
    freeze_a_dtensor(rank, world_size)
    write_by_collectives(rank, world_size)


def test_collectives_writes_are_copied_and_dtensors_frozen() -> None:
    run_ranks(check_on_ranks, 2, timeout_s=60)


@pytest.mark.parametrize("detect", ["declared", "content"])
@settings(max_examples=examples(40), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_copy_is_right_for_any_frozen_part_and_writes(detect: str, data: st.DataObject) -> None:
    """Declared truthfully, over any overlaps, ``verify`` never complains and no byte of any copy is wrong."""
    still, moving = ([torch.randint(0, 100, (n,), dtype=torch.float32) for n in (40, 300, 1200)] for _ in range(2))
    state: dict[str, Any] = {}
    for k in range(data.draw(st.integers(1, 5))):
        state[f"still.{k}"] = data.draw(tensors(still))
    for k in range(data.draw(st.integers(0, 4))):
        state[f"free.{k}"] = data.draw(tensors(moving if data.draw(st.booleans()) else still))
    stager = build(frozen=["still.*"], detect=detect, verify=True, max_in_flight=data.draw(st.sampled_from([4, 5])))
    held: list[tuple[dict[str, torch.Tensor], dict[str, bytes]]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        held.append((stager.stage(state), {name: states.bits(x) for name, x in state.items()}))
        x = data.draw(st.sampled_from(moving))
        written = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        begin = data.draw(st.integers(0, len(written)))
        written[begin : data.draw(st.integers(begin, len(written)))].bitwise_xor_(1)
        what = data.draw(st.sampled_from(["nothing", "drop", "new", "swap"]))
        if what == "drop":
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        elif what == "new":
            state[f"free.{len(state)}"] = data.draw(tensors(moving))
        elif what == "swap":
            state["still.0"] = data.draw(tensors(still))
        for copy, before in held:
            assert {name: states.bits(x) for name, x in copy.items()} == before
    stager.close()
    for copy, before in held:
        assert {name: states.bits(x) for name, x in copy.items()} == before
