"""What a rank would write is sent once, as long as it stays as it is; and anew where it does not."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.directory import Directory
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks


class Failing(DcpStorage):
    """Fails to write on one rank when it is told to."""

    fails = False

    def write_files(self, *args: Any) -> Any:
        if self.fails:
            raise OSError("the disk is full")
        return super().write_files(*args)


def save(rank: int, size: int, root: str, happens: str) -> tuple[list[int], list[int], bool]:
    """Save eight steps; return the bytes of this rank's messages in each, and how many; and whether all came back."""
    counts: list[list[int]] = []
    collect, hand_out = RankGroup._collect, RankGroup._hand_out

    def collected(group: RankGroup, post: bytes, limit: Any) -> list[bytes]:
        counts[-1].append(len(post))
        return collect(group, post, limit)

    def handed_out(group: RankGroup, answers: Any, limit: Any) -> bytes:
        answer = hand_out(group, answers, limit)
        counts[-1].append(len(answer))
        return answer

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    first, moved, *rest = model.parameters()
    optimizer = torch.optim.Adam([{"params": [first, moved], "lr": 0.25}, {"params": rest, "lr": 0.5}])
    storage = Failing()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "x": torch.ones(3)}
    with Checkpointer(root, keep=9, stager=BlockingAsyncStager(), storage=storage) as keeper:
        RankGroup._collect, RankGroup._hand_out = collected, handed_out  # type: ignore[method-assign]
        for step in range(8):
            for x in model.parameters():
                x.grad = torch.full_like(x, step)
            optimizer.step()
            state["step"] = step
            if step == 6 and happens == "one rank has more" and rank == 1:
                state["more"] = torch.ones(3)
            if step == 6 and happens == "another object":
                state["step"] = torch.float16  # as many bytes in the file
            if step == 6 and happens == "another dtype":
                state["x"] = torch.full((3,), 7, dtype=torch.int32)
            if step == 6 and happens == "other groups":
                one, other = optimizer.param_groups
                one["params"], other["params"] = [first], [*rest, moved]
            storage.fails = rank == 1 and step == 5 and happens == "a save fails"
            counts.append([])
            try:
                keeper.save(step, state)
                keeper.wait()
            except CheckpointError:
                assert storage.fails or happens == "a save fails"
    RankGroup._collect, RankGroup._hand_out = collect, hand_out  # type: ignore[method-assign]
    other = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    fresh: dict[str, Any] = {"model": other, "step": 0, "x": torch.empty(0)}
    with Checkpointer(root, stager=BlockingAsyncStager(), storage=Failing()) as keeper:
        assert keeper.restore(fresh) == 7
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    same &= fresh["x"].dtype == state["x"].dtype and torch.equal(fresh["x"], state["x"])
    rate = "optimizer.param_groups.0.bias.lr"
    found: dict[str, Any] = {rate: 0.0}
    torch.distributed.checkpoint.load(found, checkpoint_id=f"{root}/latest", no_dist=True)
    same &= found[rate] == (0.5 if happens == "other groups" else 0.25)
    return (
        [sum(each) for each in counts],
        [len(each) for each in counts],
        same and str(fresh["step"]) == str(state["step"]),
    )


def scheduled(rank: int, size: int, root: str) -> tuple[list[int], int, list[bool], int]:
    """Train stages whose rates and random numbers change.

    Returns:
        This rank's bytes in each save; those of the index; what came back; and how often it listed a directory.
    """
    import numpy

    counts: list[int] = []
    listed: list[str] = []
    collect, files = RankGroup._collect, Directory.list

    def counted(place: Directory, written: str, named: Iterable[str] = ()) -> Any:
        if written.endswith(".tmp"):  # what is being saved
            listed.append(written)
        return files(place, written)

    def collected(group: RankGroup, post: bytes, limit: Any) -> list[bytes]:
        counts[-1] += len(post)
        return collect(group, post, limit)

    def stage() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        layers = {f"layer_{rank * 40 + i}": torch.nn.Linear(2, 2) for i in range(40)}
        model = torch.nn.ModuleDict(layers)
        weights, biases = ([x for x in model.parameters() if x.ndim == ndim] for ndim in (2, 1))
        return model, torch.optim.Adam([{"params": weights, "lr": 0.25}, {"params": biases, "lr": 0.5}])

    def drawn() -> list[float]:
        return [random.gauss(0, 1), float(numpy.random.randn()), float(torch.rand(()))]

    model, optimizer = stage()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    random.seed(rank), numpy.random.seed(rank), torch.manual_seed(rank)
    with Checkpointer(root, stager=BlockingAsyncStager()) as keeper:
        RankGroup._collect, Directory.list = collected, counted  # type: ignore[method-assign]
        for step in range(6):
            for x in model.parameters():
                x.grad = torch.full_like(x, drawn()[0])
            optimizer.step()
            schedule.step()
            counts.append(0)
            keeper.save(step, state)
            keeper.wait()
        RankGroup._collect, Directory.list = collect, files  # type: ignore[method-assign]
        expected = drawn(), [group["lr"] for group in optimizer.param_groups]
    model, optimizer = stage()
    drawn()
    with Checkpointer(root, stager=BlockingAsyncStager()) as keeper:
        keeper.restore({"model": model, "optimizer": optimizer})
    found = drawn(), [group["lr"] for group in optimizer.param_groups]
    index = len((Path(root) / "latest" / "index.json").read_bytes())
    return counts, index, [one == other for one, other in zip(found, expected, strict=True)], len(listed)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(scheduled, 2, args=(str(tmp_path_factory.mktemp("root") / "x"),), timeout_s=120)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = ("nothing", "a save fails", "one rank has more", "another object", "another dtype", "other groups")
    return {
        case: run_ranks(save, 2, args=(str(tmp_path_factory.mktemp("root") / "x"), case), timeout_s=120)
        for case in cases
    }


def test_a_warm_save_sends_less_than_a_thousand_bytes(ran: dict[str, Any]) -> None:
    nbytes, calls, same = ran["nothing"][1]
    assert same
    assert nbytes[0] > 3000
    assert max(nbytes[4:]) < 1000, nbytes
    assert calls == [6, *[4] * 7], "in the first save the ranks compare as well"


@pytest.mark.parametrize("case", ["another dtype", "other groups"])
def test_a_description_is_never_that_of_another_state(ran: dict[str, Any], case: str) -> None:
    assert [same for _, _, same in ran[case]] == [True, True]


@pytest.mark.parametrize("case", ["a save fails", "one rank has more", "another object"])
def test_what_changed_is_sent_anew_and_comes_back(ran: dict[str, Any], case: str) -> None:
    nbytes, _, same = ran[case][1]
    assert same
    assert nbytes[6] > 3000, nbytes
