"""The public checkpointer without some extension: an option that needs one says so, all else works."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg import assembly
from stagereg.errors import ConfigError
from stagereg.testing.ranks import run_ranks


@pytest.mark.parametrize(
    ("extension", "option", "named"),
    [
        ("tiers", {"tier": "memory"}, "memory"),
        ("callbacks", {"on_commit": lambda _: None}, "on_commit"),
        ("planning", {"every": "auto"}, "auto"),
    ],
)
def test_an_option_whose_extension_is_missing_is_refused_and_names_the_folder(
    extension: str, option: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "has", lambda name: name != extension)
    needs = rf"{named}.* needs stagereg/extensions/{extension}, which is missing in this installation: reinstall"
    with pytest.raises(ConfigError, match=re.compile(needs)):
        stagereg.Checkpointer(str(tmp_path), **option)
    assert [*tmp_path.iterdir()] == []


def test_without_any_extension_a_checkpointer_saves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "has", lambda _: False)
    state = {"x": torch.arange(3)}
    with stagereg.Checkpointer(str(tmp_path), every=2, keep=stagereg.Keep(newest=1)) as checkpointer:
        for step in range(1, 5):
            state["x"] += 1
            checkpointer.maybe_save(step, state)
    resumed = {"x": torch.zeros(3, dtype=torch.int64)}
    with stagereg.Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore(resumed) == 4
    assert resumed["x"].tolist() == [4, 5, 6]


def differing(rank: int, world_size: int, root: str) -> list[str]:
    texts = []
    for options in (
        {"preemption": stagereg.Preemption(datetime.timedelta(seconds=20 + rank))},
        {"replicas": stagereg.Replicas(verify_every=rank)},
    ):
        with pytest.raises(ConfigError) as refused:
            stagereg.Checkpointer(root, **options)  # type: ignore[arg-type]
        texts.append(str(refused.value))
    return texts


def test_options_of_extensions_that_differ_between_ranks_are_refused_by_name(tmp_path: Path) -> None:
    for grace, verify in run_ranks(differing, 2, args=(str(tmp_path),)):
        assert "grace_period=...) is not the same on all ranks: rank 0 has 0:00:20, rank 1 has 0:00:21" in grace
        assert "verify_every=...) is not the same on all ranks: rank 0 has 0, rank 1 has 1" in verify
