"""What a join records when it is left: steps with data, steps without, and the samples that a rank was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stagereg
from stagereg.base import record
from stagereg.testing import run_ranks

from ..support.parallel import COLUMNS
from ..support.reference import JOINABLES

LENGTHS = (5, 2)
SAMPLES = [sum(range(2, 2 + length)) for length in LENGTHS]
"""Batch i has 2 + i samples."""
MODES = (None, "torch", "counted", "planned")


def recordings(rank: int, world_size: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    """The ``join`` events of each case, for every kind of first joinable and of loop."""
    data = [torch.ones(2 + step, 4) for step in range(LENGTHS[rank])]
    found = {}

    def record_case(name: str, work: Any) -> None:
        directory = Path(folder) / name.replace(" ", "-")
        with record.recording(directory, rank, world_size):
            work()
        events = [json.loads(line) for line in (directory / record.file_name(rank)).read_text().splitlines()]
        joins = [event for event in events if event["event"] == "join"]
        found[name] = [{key: join[key] for key in join.keys() - {"event", "t", "run"}} for join in joins]

    def train(join: Any, model: Any, optimizer: Any, batches: Any) -> None:
        with join:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

    def case(column: str, mode: str | None, looped: bool, **kwargs: Any) -> None:
        model, optimizer = made(column)
        if mode == "planned" and not looped:
            kwargs["loader"] = data
        join = stagereg.Join([model, optimizer], mode=mode, **kwargs)
        train(join, model, optimizer, join.iterate(data) if looped else data)

    cases = [("ddp", mode, looped) for mode in MODES for looped in (False, True)]
    if JOINABLES:
        cases += [("zero", "torch", False), ("fsdp2", "torch", False), ("fsdp2", "planned", True)]
    for each in cases:
        record_case(" ".join(map(str, each)), lambda each=each: case(*each))

    def twice() -> None:
        model, optimizer = made("ddp")
        join = stagereg.Join([model, optimizer])
        for _ in range(2):
            train(join, model, optimizer, join.iterate(data))

    def inside_another() -> None:
        outer, inner = (made("ddp") for _ in range(2))
        with stagereg.Join([*outer]):
            for batch in data[:2]:
                outer[0](batch).sum().backward()
                if batch is data[0]:
                    train(stagereg.Join([*inner]), *inner, data)

    def thrown() -> None:
        with pytest.raises(stagereg.UnevenInputsError):
            case("ddp", "counted", True, throw_on_early_termination=True)

    for work in (twice, inside_another, thrown):
        record_case(work.__name__, work)
    data = data[:2]
    for looped in (False, True):
        record_case(f"off {looped}", lambda looped=looped: case("ddp", None, looped, enable=False))
    return found


def made(column: str) -> tuple[Any, Any]:
    ways = COLUMNS[column]()
    model = ways.wrap(nn.Linear(4, 1))
    return model, ways.optimizer(model, torch.optim.SGD, {"lr": 0.1})


def test_each_rank_records_its_steps_and_samples(tmp_path: Path) -> None:
    every = run_ranks(recordings, 2, args=(str(tmp_path),), timeout_s=100)
    most = max(LENGTHS)
    for rank, found in enumerate(every):
        steps = {"steps": LENGTHS[rank], "shadowed": most - LENGTHS[rank]}
        looped = steps | {"samples": SAMPLES[rank]}
        (thrown,) = found.pop("thrown")
        assert (thrown["steps"], thrown["shadowed"]) == (min(LENGTHS), 0)
        for name in [name for name in found if name.split()[-1] in ("False", "True") and "off" not in name]:
            assert found.pop(name) == [looped if name.endswith("True") else steps], name
        assert found == {
            "twice": [looped, looped],
            "inside_another": [steps, {"steps": 2, "shadowed": 0}],
            "off True": [{"steps": 2, "shadowed": 0, "samples": 5}],
            "off False": [],
        }
