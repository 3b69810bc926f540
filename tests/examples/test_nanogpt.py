"""The page nanogpt.md: its diff makes a program of that shape go on, bit for bit, whatever ended it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stagereg

from ..support.pages import Page
from ..support.programs import LIMIT_S, comes_true, free_port

SHAPE = Path(__file__).with_name("small_gpt.py")


def ported() -> str:
    """The program with the diff applied."""
    program = SHAPE.read_text()
    (diff,) = Page("nanogpt.md").of("diff")
    for hunk in diff.split("@@\n")[1:]:
        old, new = ("".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] in f" {mark}") for mark in "-+")
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


def start(folder: Path, max_iters: int, *more: str) -> list[subprocess.Popen[str]]:
    """Start two ranks as torchrun does."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", f"--max_iters={max_iters}", "--out_dir=kept", *more]
    ranks = [os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    pipe = subprocess.PIPE
    return [subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True) for env in ranks]


def end(ranks: list[subprocess.Popen[str]], code: int) -> None:
    ended = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code] * 2, ended


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("kept/step-*")), default=0)


def interrupt(folder: Path, how: signal.Signals, code: int) -> int:
    """Start it, and send the signal to both ranks once it has saved; return the step of the newest checkpoint."""
    before = newest(folder)
    ranks = start(folder, 10**6, "--stager=pinned_cached")
    assert comes_true(lambda: newest(folder) > before or any(rank.poll() is not None for rank in ranks))
    for rank in ranks:
        rank.send_signal(how)
    end(ranks, code)
    return newest(folder)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_it_goes_on_bit_for_bit_after_sigkill_and_sigterm(tmp_path: Path) -> None:
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    draw = np.random.default_rng(0)
    for folder in (interrupted, whole):
        folder.mkdir()
        (folder / "train.py").write_text(ported())
    for split, length in (("train", 4000), ("val", 1000)):
        tokens = (draw.integers(0, 4, length).cumsum() % 64).astype(np.uint16)
        for folder in (interrupted, whole):
            tokens.tofile(folder / f"{split}.bin")
    killed = interrupt(interrupted, signal.SIGKILL, -signal.SIGKILL)
    left = interrupt(interrupted, signal.SIGTERM, 75)
    assert 0 < killed < left
    last = (left // 10 + 1) * 10
    for folder in (interrupted, whole):
        end(start(folder, last), 0)
    ours, theirs = (stagereg.open_checkpoint(folder / "kept" / f"step-{last:08}") for folder in (interrupted, whole))
    assert list(ours) == list(theirs)
    assert {"batch.rank0.0", "batch.rank1.1"} < {*ours}
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_page_says_how_many_lines_its_diff_changes() -> None:
    (diff,) = Page("nanogpt.md").of("diff")
    added, removed = (len(re.findall(rf"^\{mark}", diff, re.M)) for mark in "+-")
    assert f"adds {added} lines and removes {removed}." in Page("nanogpt.md").text
    assert ported().count("stagereg.") == 5
