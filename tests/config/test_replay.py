"""A run is repeated from the config it left in ``.hydra``: the component gets the same objects of the same types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import enum
from dataclasses import dataclass
from datetime import timedelta

import torch

import stagereg
from stagereg import ByteSize


class Codec(enum.Enum):
    ZSTD = 1
    NONE = 2


@dataclass(frozen=True)
class Net:
    host: str
    wait: timedelta = timedelta(seconds=3)


@stagereg.register("join", "mine")
def mine(
    number: int,
    budget: ByteSize = ByteSize("4GiB"),
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    wait: timedelta = timedelta(hours=1.5),
    codecs: dict[str, Codec] = {},
    net: Net = Net("here"),
    more: Net | None = None,
):
    return dict(locals())


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    print("MADE", stagereg.instantiate(cfg.join))


if __name__ == "__main__":
    train()
"""

# Both in one process, since one that imports torch costs seconds; the run that they repeat was in another.
AGAIN = """
import runpy, sys

given = sys.argv[1:]
for more in ([], ["join.net.wait=3 dayz", "join.budget=1"]):
    sys.argv = ["train.py", *given, *more]
    runpy.run_path("train.py", run_name="__main__")
"""

OVERRIDES = """
number=7 budget=512MB dtype=bfloat16 device=cuda:1 wait=00:05:00 codecs={a:ZSTD}
net.host=there net.wait=1m more={host:c}
"""

MADE = (
    "MADE {'number': 7, 'budget': ByteSize('512MB'), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=1), "
    "'wait': datetime.timedelta(seconds=300), 'codecs': {'a': <Codec.ZSTD: 1>}, "
    "'net': Net(host='there', wait=datetime.timedelta(seconds=60)), "
    "'more': Net(host='c', wait=datetime.timedelta(seconds=3))}\n"
)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("defaults: [{join: mine}, _self_]\nhydra: {run: {dir: run}}\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "again.py").write_text(AGAIN)
    return tmp_path


def run(app: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, cwd=app, text=True, capture_output=True, timeout=100, check=False)


def test_a_replayed_run_gets_the_same_objects_and_wrong_ones_are_refused(app: Path) -> None:
    first = run(app, "train.py", *(f"join.{override}" for override in OVERRIDES.split()))
    assert first.stdout == MADE, first.stderr

    replay = ["--config-path", "run/.hydra", "--config-name", "config", "hydra.output_subdir=null"]
    again = run(app, "again.py", *replay)
    assert again.stdout == MADE
    assert again.stderr.startswith("rank 0: join.net.wait: '3 dayz' has no unit of time after 3. Did you mean 'day")
    assert again.returncode == 1
