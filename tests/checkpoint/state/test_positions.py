"""A data loader or a sampler that has no state is refused with lines that resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as data
from torch.utils.data.distributed import DistributedSampler

import stagereg
from stagereg.assembly import Checkpointer

from .test_nested import refused, restore, save

DATASET = data.TensorDataset(torch.arange(12))


class Own(data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def loader() -> Any:
    return data.DataLoader(DATASET, batch_size=2, shuffle=True)


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: iter(loader()),
        lambda: data.RandomSampler(DATASET),
        lambda: data.BatchSampler(Own(), 2, False),
        lambda: DistributedSampler(DATASET, 2, 0),
        Own,
        lambda: DATASET,
        lambda: stagereg.per_rank(loader()),
        lambda: {"inner": [loader()]},
    ],
)
def test_a_position_without_a_state_is_refused_by_restore_and_by_save(tmp_path: Path, make: Callable[[], Any]) -> None:
    for act in (restore, save):
        text = refused(lambda act=act: act(tmp_path, {"x": 1, "pos": make()}))  # type: ignore[misc]
        assert "stagereg.data.ResumableSampler(dataset)" in text
        assert "add_safe_globals" not in text


def test_a_position_is_refused_although_its_types_are_allowed(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([data.RandomSampler, data.TensorDataset]):
        save(tmp_path, {"x": DATASET})
        assert "ResumableSampler" in refused(lambda: save(tmp_path, {"sampler": data.RandomSampler(DATASET)}))


def test_the_lines_of_the_refusal_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    text = refused(lambda: save(tmp_path, {"loader": loader()}))
    lines = [line.strip() for line in text.splitlines()[1:5]]
    lines = [line.replace("batch_size=...", "batch_size=2").replace("epochs=...", "epochs=1") for line in lines]

    def train(last: int) -> list[int]:
        space: dict[str, Any] = {"stagereg": stagereg, "dataset": DATASET, "DataLoader": data.DataLoader, "state": {}}
        exec("\n".join(lines[:3]), space)
        seen: list[int] = []
        with Checkpointer(tmp_path, every=1) as checkpointer:
            step = checkpointer.restore(space["state"]) or 0
            for [batch] in eval(lines[3].removeprefix("for batch in ").removesuffix(":"), space):
                seen += batch.tolist()
                step += 1
                checkpointer.maybe_save(step, space["state"])
                if step == last:
                    break
        return seen

    assert sorted(train(3) + train(6)) == [*range(12)]
