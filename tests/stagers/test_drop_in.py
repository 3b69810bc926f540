"""Drop-in: torch's names and signatures, and ``torch.distributed.checkpoint.async_save`` takes what is built here."""

from __future__ import annotations

import inspect
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging as theirs
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import stagereg
from stagereg import AsyncStager, BlockingAsyncStager, Checkpointer
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks

from ..support.states import build

pytestmark = pytest.mark.filterwarnings("ignore")


class OnlyStage(AsyncStager):
    """The least that a stager of a user may be."""

    def stage(self, state_dict: dict[str, Any]) -> Any:
        return {key: value.clone() for key, value in state_dict.items()}


def loaded(path: Path | str, **like: torch.Tensor) -> dict[str, torch.Tensor]:
    state = {key: torch.zeros_like(x) for key, x in like.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_signatures_are_torchs() -> None:
    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(BlockingAsyncStager) == parameters(theirs.BlockingAsyncStager)
    kept = BlockingAsyncStager(True, True)
    assert (kept.cache_staged_state_dict, kept.type_check) == (True, True)
    for name in ("stage", "synchronize_staging", "close"):
        for kind in ("AsyncStager", "BlockingAsyncStager"):
            mine, other = getattr(stagereg, kind), getattr(theirs, kind)
            assert parameters(getattr(mine, name)) == parameters(getattr(other, name)), (kind, name)
    assert isinstance(AsyncStager.should_synchronize_after_execute, property)


def test_ours_are_torchs(stager: AsyncStager) -> None:
    assert isinstance(stager, theirs.AsyncStager)
    assert isinstance(stager, AsyncStager)
    assert stager.should_synchronize_after_execute is False
    assert OnlyStage().should_synchronize_after_execute is True
    assert AsyncStager._synchronize_after_execute is theirs.AsyncStager._synchronize_after_execute is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stager.synchronize_staging()


def test_torchs_are_ours() -> None:
    kept = theirs.DefaultStager(theirs.StagingOptions(False, False, False, False))
    assert isinstance(theirs.BlockingAsyncStager(), AsyncStager)
    assert isinstance(kept, AsyncStager)
    assert not isinstance(object(), AsyncStager)
    kept.close()


def test_a_stager_without_stage_is_an_error_that_names_it() -> None:
    class Nothing(AsyncStager):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing must implement stage\(state_dict\)"):
        Nothing().stage({})


def test_a_users_stager_with_only_stage(tmp_path: Path) -> None:
    w = torch.ones(10)
    saved = dcp.async_save({"w": w}, checkpoint_id=tmp_path, async_stager=OnlyStage(), no_dist=True)
    w.fill_(2)
    saved.result(timeout=30)
    assert loaded(tmp_path, w=w)["w"].eq(1).all()


def test_a_future_that_failed_raises_where_training_is(tmp_path: Path) -> None:
    class Failing(OnlyStage):
        def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
            failed: Future[dict[str, Any]] = Future()
            failed.set_exception(RuntimeError("out of memory"))
            return failed

    checkpointer = Checkpointer(str(tmp_path), stager=Failing())
    with pytest.raises(CheckpointError, match="out of memory"):
        checkpointer.save(1, {"w": torch.ones(2)})
    checkpointer.close()
    assert checkpointer.latest is None


def save_in_a_process(rank: int, world_size: int, folder: str) -> None:
    for kind in ("blocking", "pinned_cached"):
        stager = build(kind)
        w, tied = torch.ones(1000), torch.arange(6.0)
        for step in range(2):
            w.fill_(step)
            path = f"{folder}/{kind}-{step}"
            response = dcp.async_save(
                {"w": w, "a": tied, "b": tied[1:], "list": [torch.ones(3)], "n": 5},
                checkpoint_id=path,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=stager,
            )
            w.fill_(-1)
            response.result(timeout=90)
            del response
            got = loaded(path, w=w, b=tied[1:])
            assert got["w"].eq(step).all()
            assert got["b"].tolist() == [1, 2, 3, 4, 5]
        assert stager._copier.pool.in_flight == 0, "the copies' leases have ended"
        stager.close()


@pytest.mark.slow
def test_async_save_in_a_process(tmp_path: Path) -> None:
    run_ranks(save_in_a_process, 1, args=(str(tmp_path),), timeout_s=100)
