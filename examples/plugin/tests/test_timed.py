"""Tests of the hook: its contract, and its log line, with the hook chosen in a config."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import stagereg
import torch
from hydra import compose, initialize_config_dir
from stagereg.testing import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lean_export.timed_contract import TimedDdpContract

APP = """
defaults:
  - stagereg
  - joinable@join.joinables.model: ddp
  - join_hook@join.joinables.model.hook: ddp_timed
  - _self_
"""


class TestContract(TimedDdpContract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def logged(rank: int, world_size: int, cfg: Any) -> list[str]:
    """Train on one batch or three, and return the messages that this rank logged."""
    messages = Messages()
    log = logging.getLogger("lean_export")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    model = DistributedDataParallel(nn.Linear(2, 1))
    with stagereg.instantiate(cfg, model=model):
        for _ in range([1, 3][rank]):
            model(torch.ones(4, 2)).sum().backward()
    return messages.seen


def test_steps_without_data_are_logged_unless_they_are_short(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text(APP)
    for least_s, expected in (("0", [1, 0]), ("1000", [0, 0])):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            cfg = compose("app", [f"join.joinables.model.hook.least_s={least_s}"]).join
        seen = run_ranks(logged, 2, args=(cfg,))
        assert [len(lines) for lines in seen] == expected
        assert all("this rank took part in 2 steps" in line for lines in seen for line in lines)
