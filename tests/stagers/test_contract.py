"""Isolation, change and end: what every stager promises, whatever memory it uses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import stagereg
from stagereg import AsyncStager, BlockingAsyncStager
from stagereg.errors import StagingError

from .states import assert_same


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class TestIsolation:
    def test_writing_into_the_copy_leaves_the_source_alone(self, stager: AsyncStager) -> None:
        source = {"w": torch.ones(10), "odd": torch.ones(64, 64)[:, 3], "meta": {"a": [1]}}
        copy = stager.stage(source)
        copy["w"].zero_()
        copy["odd"].zero_()
        copy["meta"]["a"].append(2)
        assert source["w"].eq(1).all()
        assert source["odd"].eq(1).all()
        assert source["meta"] == {"a": [1]}


class TestChange:
    def test_the_same_memory_seen_otherwise_is_staged_otherwise(self, stager: AsyncStager) -> None:
        grid = torch.arange(16).view(4, 4)
        for view in (grid, grid.t(), grid.view(torch.float64), grid.view(16), grid[:2], grid[:, :2], grid):
            assert_same(stager.stage({"x": view}), {"x": view})


class TestEnd:
    @pytest.mark.parametrize("plain", [lambda: stagereg.build("stager", "blocking"), BlockingAsyncStager])
    def test_a_stager_without_a_pool_frees_a_copy_when_it_is_dropped(self, plain) -> None:
        stager = plain()
        source = {"w": torch.ones(2**26)}
        before = resident_mib()
        stager.stage(source)
        assert resident_mib() - before < 50


class TestBadInput:
    @pytest.mark.parametrize("wrong", [{"max_in_flight": 0}, {"threads": 0}, {"max_in_flight": -1}])
    def test_a_senseless_argument_is_refused_by_name(self, make, wrong: dict[str, int]) -> None:
        with pytest.raises(StagingError, match=next(iter(wrong))):
            make(**wrong)

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")
    def test_pinned_cached_works_without_an_accelerator_and_logs_it(self, caplog) -> None:
        with caplog.at_level(logging.INFO, logger="stagereg"):
            stager = stagereg.build("stager", "pinned_cached")
            for _ in range(3):
                assert stager.stage({"w": torch.ones(3)})["w"].eq(1).all()
            stager.close()
        assert [r.getMessage().count("no accelerator") for r in caplog.records] == [1]
