"""Ranks whose optimizers did not step equally often find out at the end of the join; nothing else is taken for that."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from ..support.reference import JOINABLES

LENGTHS = (2, 5, 3)
WAYS = ("iterate", "planned", "counted", "torch")


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def one(rank: int, what: str, way: str) -> tuple[str, list[str]]:
    """The error of a join, and its warnings."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    kind: Any = torch.optim.SGD if "SGD" in what else torch.optim.Adam
    optimizer: Any = kind(model.parameters(), lr=0.01)
    if what.startswith("more ranks"):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.01)
    calls = 0

    def every_second() -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            optimizer.step()

    listed = [model]
    if "not listed" not in what or what.startswith("a second"):
        listed += [every_second if "counts its calls" in what else optimizer]
    second = torch.optim.Adam([model.module.bias]) if what == "a second, not listed" else None
    batches = [torch.ones(2, 4) for _ in range(LENGTHS[rank] if second is None else 5 * (rank > 0))]
    loader = batches if way in ("planned", "counted") else None
    handler, text = Warnings(), ""
    logging.getLogger("stagereg").addHandler(handler)
    try:
        with stagereg.Join(listed, mode=None if way == "iterate" else way, timeout=20, loader=loader) as join:
            for i, x in enumerate(join.iterate(batches) if way == "iterate" else batches, 1):
                if what == "another optimizer":
                    delta = torch.zeros(4, requires_grad=True)
                    inner = torch.optim.Adam([delta])
                    delta.grad = x.sum(0)
                    inner.step()
                reduces = "no_sync" not in what or i % 2 == 0
                with contextlib.nullcontext() if reduces else model.no_sync():
                    model(x).sum().backward()
                if "counts its calls" in what:
                    every_second()
                elif reduces:
                    optimizer.step()
                if second is not None:
                    second.step()
                if "twice" in what or ("only with data" in what and len(x)):
                    optimizer.step()
    except stagereg.StageregError as error:
        text = str(error)
    finally:
        logging.getLogger("stagereg").removeHandler(handler)
    return text, handler.texts


def every(rank: int, world_size: int, whats: list[str], ways: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    return {(what, way): one(rank, what, way) for what in whats for way in ways}


def test_what_is_alike_is_no_error() -> None:
    whats = ["listed", "another optimizer"]
    if JOINABLES:
        whats += ["more ranks than parameters", "more ranks than parameters, SGD"]
    for found in run_ranks(every, 3, args=([*whats, "SGD, not listed"], WAYS), timeout_s=100):
        assert {case: each for case, each in found.items() if each != ("", [])} == {}


def test_an_optimizer_that_is_not_listed_is_warned_of() -> None:
    for found in run_ranks(every, 3, args=(["not listed"], WAYS[1:]), timeout_s=60):
        for error, (warning,) in found.values():
            assert not error
            assert "an optimizer did not step equally often on all ranks" in warning
            assert "steps on rank" in warning


def test_a_listed_one_that_differs_is_an_error_on_all_ranks() -> None:
    cases = [
        ("counts its calls, under no_sync", "planned"),
        ("counts its calls, under no_sync", "torch"),
        ("twice", "counted"),
        ("a second, not listed", "planned"),
        ("only with data", "iterate"),
    ]
    for what, way in cases:
        for found in run_ranks(every, 3, args=([what], (way,)), timeout_s=60):
            ((text, _),) = found.values()
            assert "an optimizer did not step equally often on all ranks of this join" in text, (what, text)
