"""What a join records when it is left: steps with data, steps without, and the samples that a rank was given."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

import stagereg
from stagereg import record
from stagereg.join.batches import SampleCounter, samples_in
from stagereg.testing import run_ranks

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
        found[name] = [{key: join[key] for key in join.keys() - {"event", "t"}} for join in joins]

    def train(join: Any, model: Any, optimizer: Any, batches: Any) -> None:
        with join:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

    def case(wrap: str, mode: str | None, looped: bool, **kwargs: Any) -> None:
        model, optimizer = wrapped(wrap)
        if mode == "planned" and not looped:
            kwargs["loader"] = data
        join = stagereg.Join([model, optimizer], mode=mode, **kwargs)
        train(join, model, optimizer, join.iterate(data) if looped else data)

    cases = [("ddp", mode, looped) for mode in MODES for looped in (False, True)]
    cases += [("zero", "torch", False), ("fsdp2", "torch", False), ("fsdp2", "planned", True)]
    for each in cases:
        record_case(" ".join(map(str, each)), lambda each=each: case(*each))

    def twice() -> None:
        model, optimizer = wrapped("ddp")
        join = stagereg.Join([model, optimizer])
        for _ in range(2):
            train(join, model, optimizer, join.iterate(data))

    def inside_another() -> None:
        outer, inner = (wrapped("ddp") for _ in range(2))
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


def wrapped(wrap: str) -> tuple[Any, Any]:
    model = nn.Linear(4, 1)
    if wrap == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    if wrap == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


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


X = torch.zeros(7, 3)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, torch.zeros(9)),
        [["a", "b"], {"ids": X}],
        {"step": torch.tensor(3), "text": ["a"] * 10_000, "x": X},
        UserDict(x=X),
        (numpy.float32(1), numpy.zeros(7)),
        X.to_sparse(),
        pack_sequence([torch.zeros(length) for length in (5, 4, 3, 2, 1, 1, 1)]),
        torch.nested.nested_tensor([torch.zeros(2)] * 7, layout=torch.jagged),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch: Any) -> None:
    assert samples_in(batch) == 7


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("batch", [None, "text", object(), {}, [[1], {"x": ()}], CIRCLE, torch.tensor(1.0)])
def test_a_batch_without_a_tensor_has_an_unknown_size(batch: Any) -> None:
    assert samples_in(batch) is None
    seen = SampleCounter()
    for each in (X, batch, X):
        seen.add(each)
    assert (seen.batches, seen.samples) == (3, None)
