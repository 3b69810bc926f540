"""A rank that takes long, whatever for, is not lost: the run waits for it and trains on, and saves nothing in haste."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ..support.programs import SAVING, Program, plain

STEPS = 12
LIMIT_S = 280.0  # a compiler takes a minute on a busy machine
SCRIPT = """
import ctypes, os, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stagereg

HOLD = '''
import ctypes, os, sys, time
ptrace = ctypes.CDLL(None).ptrace
threads = [int(each) for each in os.listdir(f"/proc/{sys.argv[1]}/task")]
for each in threads:
    assert not ptrace(16, each, 0, 0)
    os.waitpid(each, 0x40000000)
assert open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()[0] == "t"
time.sleep(float(sys.argv[2]))
for each in threads:
    assert not ptrace(17, each, 0, 0)
'''


def take_long(what, seconds):
    if what == "a debugger holds it":
        subprocess.run([sys.executable, "-c", HOLD, str(os.getpid()), str(seconds)], check=True)
    if what == "it holds the lock of the interpreter":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    model = DistributedDataParallel(torch.compile(model) if cfg.what == "it compiles" and rank == 1 else model)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.module, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        for step in range((checkpointer.restore(state) or 0) + 1, cfg.steps + 1):
            began = time.monotonic()
            if rank == 1 and step == 1:
                take_long(cfg.what, 3 * cfg.notice_s)
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                print(f"TOOK {time.monotonic() - began}", flush=True)
            checkpointer.maybe_save(step, state)


if __name__ == "__main__":
    train()
"""
CONFIG = f"""{SAVING}
nproc: 2
notice_s: 5
steps: {STEPS}
checkpoint: {{every: 5}}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "notice_s"),
    [("a debugger holds it", 5.0), ("it holds the lock of the interpreter", 5.0), ("it compiles", 1.0)],
)
def test_a_rank_whose_first_step_takes_long_is_not_lost(tmp_path: Path, what: str, notice_s: float) -> None:
    if what == "it compiles" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler")
    program = Program(tmp_path, CONFIG, SCRIPT)
    command = program.command(f"what='{what}'", f"notice_s={notice_s}")
    env = plain() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert "lost rank" not in ended.stdout + ended.stderr
    took = [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("TOOK")]
    assert min(took) > 3 * notice_s
    saved = sorted(path.name for path in tmp_path.glob("outputs/*/*/checkpoints/step-*"))
    assert saved == [f"step-{step:08d}" for step in (10, STEPS)][-len(saved) :], "nothing else was saved"
