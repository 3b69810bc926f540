"""Isolation, change and end: what every stager promises, whatever memory it uses."""

from __future__ import annotations

import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import stagereg
from stagereg import AsyncStager, BlockingAsyncStager, StageregError
from stagereg.errors import StagerClosedError, StagingError


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class TestIsolation:
    def test_no_later_write_shows(self, stager: AsyncStager) -> None:
        source = {"w": torch.ones(1000), "big": torch.ones(2**20), "nested": [{"b": torch.ones(3, 3)}], "n": [1, 2]}
        copy = stager.stage(source)
        for x in (source["w"], source["big"], source["nested"][0]["b"]):
            x.fill_(7)
        source["n"].append(3)
        source["nested"].clear()
        for x in (copy["w"], copy["big"], copy["nested"][0]["b"]):
            assert torch.equal(x, torch.ones_like(x))
        assert copy["n"] == [1, 2]

    def test_writes_that_no_version_counter_sees_are_staged(self, stager: AsyncStager) -> None:
        w = torch.zeros(100)
        stager.stage({"w": w})
        w.numpy()[:] = 1
        assert stager.stage({"w": w})["w"].eq(1).all()
        w.data.add_(1)
        assert stager.stage({"w": w})["w"].eq(2).all()
        w.data = torch.full((100,), 5.0)
        assert stager.stage({"w": w})["w"].eq(5).all()

    def test_writing_into_the_copy_leaves_the_source_alone(self, stager: AsyncStager) -> None:
        source = {"w": torch.ones(10), "odd": torch.ones(64, 64)[:, 3], "meta": {"a": [1]}}
        copy = stager.stage(source)
        copy["w"].zero_()
        copy["odd"].zero_()
        copy["meta"]["a"].append(2)
        assert source["w"].eq(1).all()
        assert source["odd"].eq(1).all()
        assert source["meta"] == {"a": [1]}

    def test_leaves_that_are_no_tensors_are_copied_too(self, stager: AsyncStager) -> None:
        class Config:
            def __init__(self) -> None:
                self.steps = [1]

        source = {"config": Config(), "set": {1}, "bytes": bytearray(b"ab")}
        copy = stager.stage(source)
        source["config"].steps.append(2)
        source["set"].add(2)
        source["bytes"][0] = 0
        assert copy["config"].steps == [1]
        assert copy["set"] == {1}
        assert copy["bytes"] == bytearray(b"ab")


class TestChange:
    def test_everything_may_change_between_calls(self, stager: AsyncStager, assert_same) -> None:
        states = [
            {"a": torch.ones(6)},
            {"a": torch.ones(1)},  # broadcastable to what was there
            {"a": torch.tensor(3.0)},
            {"a": torch.arange(6)},  # another dtype
            {"a": torch.arange(6).to(torch.bfloat16)},
            {"a": torch.ones(3, 2).t()},
            {"b": torch.ones(6), "a": torch.ones(6)},
            {"b": [torch.ones(6), {"a": torch.ones(6)}]},
            {"b": [torch.ones(6)]},
            {"b": torch.ones(6, requires_grad=True)},
            {"b": 6},
            {},
            {"a": torch.ones(6)},
        ]
        for state in states + states[::-1]:
            assert_same(stager.stage(state), state)

    def test_a_tensor_resized_in_place_is_staged_in_its_new_size(self, stager: AsyncStager) -> None:
        x = torch.ones(4)
        stager.stage({"x": x})
        x.resize_(100).fill_(3)
        assert stager.stage({"x": x})["x"].tolist() == [3.0] * 100
        x.resize_(2)
        assert stager.stage({"x": x})["x"].tolist() == [3.0] * 2

    def test_a_storage_smaller_than_its_tensor_is_an_error_and_the_stager_stays_usable(
        self, stager: AsyncStager
    ) -> None:
        x = torch.ones(100_000)
        state = {"model": {"w": x}}
        stager.stage(state)
        for left in (4, 0):
            x.untyped_storage().resize_(left)
            with pytest.raises(StagingError, match=r"model\.w") as caught:
                stager.stage(state)
            assert caught.value.path == ("model", "w")
        assert stager.stage({"ok": torch.ones(3)})["ok"].eq(1).all()

    def test_the_same_memory_seen_otherwise_is_staged_otherwise(self, stager: AsyncStager, assert_same) -> None:
        grid = torch.arange(16).view(4, 4)
        for view in (grid, grid.t(), grid.view(torch.float64), grid.view(16), grid[:2], grid[:, :2], grid):
            assert_same(stager.stage({"x": view}), {"x": view})

    def test_ties_that_appear_and_go_are_followed(self, stager: AsyncStager) -> None:
        x = torch.arange(4.0)
        tied = stager.stage({"a": x, "b": x[1:]})
        assert tied["a"].untyped_storage().data_ptr() == tied["b"].untyped_storage().data_ptr()
        apart = stager.stage({"a": x, "b": x[1:].clone()})
        assert apart["a"].untyped_storage().data_ptr() != apart["b"].untyped_storage().data_ptr()


class TestEnd:
    def test_use_after_close_is_an_error(self, stager: AsyncStager) -> None:
        stager.stage({"w": torch.ones(3)})
        stager.close()
        stager.close()
        with pytest.raises(StagerClosedError, match="closed; build a new one") as caught:
            stager.stage({"w": torch.ones(3)})
        assert isinstance(caught.value, StageregError)
        stager.synchronize_staging()

    def test_a_stager_never_used_can_be_closed(self, stager: AsyncStager) -> None:
        stager.close()
        with pytest.raises(StagerClosedError):
            stager.stage({})

    def test_copies_outlive_the_stager(self, stager: AsyncStager) -> None:
        copy = stager.stage({"w": torch.ones(2**21)})
        stager.close()
        gone = weakref.ref(stager)
        del stager
        assert gone() is not None  # the fixture's
        torch.full((2**21,), 9.0)  # would land in memory that was freed too early
        assert copy["w"].eq(1).all()

    def test_a_dropped_copy_and_close_give_the_memory_back(self, stager: AsyncStager) -> None:
        source = {"w": torch.ones(2**26)}  # 256 MiB
        before = resident_mib()
        copy = stager.stage(source)
        during = resident_mib()
        assert during - before > 200
        del copy
        stager.close()
        assert resident_mib() - before < 50

    @pytest.mark.parametrize("plain", [lambda: stagereg.build("stager", "blocking"), BlockingAsyncStager])
    def test_a_stager_without_a_pool_frees_a_copy_when_it_is_dropped(self, plain) -> None:
        stager = plain()
        source = {"w": torch.ones(2**26)}
        before = resident_mib()
        stager.stage(source)
        assert resident_mib() - before < 50

    def test_close_ends_the_copying_threads(self, make) -> None:
        import threading

        before = set(threading.enumerate())
        stager = make(threads=3)
        stager.stage({"w": torch.ones(2**22)})
        assert set(threading.enumerate()) - before
        stager.close()
        assert set(threading.enumerate()) == before


class TestBadInput:
    @pytest.mark.parametrize("wrong", [{"max_in_flight": 0}, {"threads": 0}, {"max_in_flight": -1}])
    def test_a_senseless_argument_is_refused_by_name(self, make, wrong: dict[str, int]) -> None:
        with pytest.raises(StagingError, match=next(iter(wrong))):
            make(**wrong)

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")
    def test_without_an_accelerator_pinned_cached_works_and_logs_it_once(self, caplog) -> None:
        with caplog.at_level(logging.INFO, logger="stagereg"):
            stager = stagereg.build("stager", "pinned_cached")
            for _ in range(3):
                assert stager.stage({"w": torch.ones(3)})["w"].eq(1).all()
            stager.close()
        assert [r.getMessage().count("no accelerator") for r in caplog.records] == [1]

    def test_an_error_leaves_the_stager_and_its_copies_usable(self, stager: AsyncStager) -> None:
        copy = stager.stage({"w": torch.ones(3)})
        for _ in range(5):
            with pytest.raises(StagingError):
                stager.stage({"w": torch.ones(3), "bad": (i for i in ())})
        assert stager.stage({"w": torch.zeros(3)})["w"].eq(0).all()
        assert copy["w"].eq(1).all()

    def test_stage_may_be_called_from_another_thread(self, stager: AsyncStager) -> None:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(stager.stage, {"w": torch.ones(3)}).result(timeout=20)["w"].eq(1).all()
