"""The pages about joins: their snippets do what the pages describe, on ranks with different numbers of batches."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch.distributed.fsdp import fully_shard

import stagereg
from stagereg.join.kinds.ddp import DdpHook
from stagereg.testing import run_ranks

from ...support.pages import DOCS, Page

SNIPPETS = [*Page("join.md").of("python"), *Page("join-recipes.md").of("python")]


class MyHook(DdpHook):
    """A plugin's hook."""


def composed(folder: Path, overrides: list[str]) -> Any:
    """The config of the page, with options of its own from the command line."""
    (config,) = Page("join.md").of("yaml")
    (folder / "app.yaml").write_text(config)
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("app", overrides)


def run_page(rank: int, world: int, blocks: list[str], cfg: Any) -> dict[str, Any]:
    """Run the blocks one after another, in an application with ``cfg``, and return what they have left behind."""
    torch.manual_seed(0)
    space: dict[str, Any] = {"cfg": cfg}
    for number, block in enumerate(blocks):
        exec(compile(block, f"join.md, snippet {number}", "exec"), space)
    shards = [param.full_tensor() for param in space["sharded"].parameters()]
    return {
        "batches": len(space["loader"]),
        "parameters": torch.cat([param.detach().flatten() for param in (*space["model"].parameters(), *shards)]),
        "moments": space["optimizer"].state_dict()["state"],
        "rates": space["scheduler"].get_last_lr(),
        "step": space["step"],
        "saved": (space["saved"], space["checkpointer"].latest.name),
        "done": space["done"],
        "thrown": str(space["thrown"]),
        "metrics": space["everywhere"],
        "configured": [type(joinable).__name__ for joinable in space["configured"].values()],
    }


def test_every_snippet_runs_and_leaves_all_ranks_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = SNIPPETS[:]
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    (section,) = (number for number, block in enumerate(blocks) if "cfg.join" in block)
    blocks[section] += "configured = join.joinables\n"
    cfg = composed(tmp_path, ["+joinable@join.joinables.metrics=metrics"])
    first, second = run_ranks(run_page, 2, args=(blocks, cfg))
    assert (first["batches"], second["batches"]) == (3, 5)
    for one in (first, second):
        assert one["parameters"].isfinite().all()
        assert one["configured"] == ["DdpJoinable", "StepJoinable", "MetricsJoinable"]
        assert one["step"] == 5
        assert one["saved"] == (5, "step-00000005")
        assert one["done"] == 3
        assert "exhausted all inputs" in one["thrown"]
        assert one["rates"] == [pytest.approx(1e-3 * 0.9**5)]
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["metrics"] == second["metrics"]
    for mine, other in zip(first["moments"].values(), second["moments"].values(), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
        assert (
            mine["step"] == 6 * 5 + 2 + 3
        )  # of the eight loops with this optimizer, one steps twice, and the last is thrown out of


def accumulate(rank: int, world: int, setup: str, section: str, sharded: bool) -> float:
    """Run the section on uneven inputs; return how far its parameters are from those that one process computes."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)
    space: dict[str, Any] = {}
    exec(setup, space)
    alone = copy.deepcopy(space["module"])
    if sharded:
        space["model"] = fully_shard(copy.deepcopy(alone))
        space["optimizer"] = torch.optim.AdamW(space["model"].parameters())
    exec(section, space)
    batches: list[Any] = [None] * world
    dist.all_gather_object(batches, [*space["loader"]])
    assert [*map(len, batches)] == [3, 5]
    optimizer = torch.optim.AdamW(alone.parameters())
    for first, last in ((0, 4), (4, 5)):
        x = torch.cat([batch for own in batches for batch in own[first:last]])
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        optimizer.step()
    whole = [getattr(param, "full_tensor", lambda param=param: param)() for param in space["model"].parameters()]
    return max((one - other).abs().max().item() for one, other in zip(whole, alone.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_accumulated_gradients_are_those_of_all_samples(kind: str) -> None:
    setup, *blocks = SNIPPETS
    (section,) = (block for block in blocks if "no_sync" in block)
    (diff,) = Page("join-recipes.md").of("diff")
    if kind == "fsdp2":
        old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == mark) for mark in "-+")
        assert old in section
        section = section.replace(old, new)
    assert max(run_ranks(accumulate, 2, args=(setup, section, kind == "fsdp2"))) < 1e-12


@pytest.mark.usefixtures("registry_as_before")
def test_the_examples_config_takes_the_command_lines(tmp_path: Path) -> None:
    stagereg.register("join_hook", "mine")(MyHook)
    page = Page("join.md")
    example = (DOCS.parent / "examples" / "conf" / "train.yaml").read_text().splitlines()
    (config,) = page.of("yaml")
    assert set(config.splitlines()) <= set(example)
    seen = []
    for line in re.findall(r"^python train.py (.*)$", page.text, re.M):
        chosen = [override for override in shlex.split(line, comments=True) if "@" in override]
        for choice in chosen[0].partition("=")[2].split(","):
            joinables = composed(tmp_path, [f"{chosen[0].partition('=')[0]}={choice}"]).join.joinables
            seen += [joinables.get("metrics", joinables.model), joinables.model.get("hook")]
    assert [each and each._target_.rpartition(".")[2] for each in seen] == [
        *("Fsdp2Joinable", None, "MetricsJoinable", None, "auto", "MyHook", "auto", "DdpHook", "auto", "MyHook")
    ]
