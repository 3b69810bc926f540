"""Programs that sweep, as a user has them: scripts in a folder, started from a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..support.forks import run_forked

# Plain Hydra; no ranks and no torch of its own, so that a job takes no time.
PLAIN = """
import os, signal, sys, time
import hydra

@hydra.main(config_path=".", config_name="app")
def main(cfg):
    if cfg.a == "raise":
        raise KeyError("no cheese <b>today</b>")
    if cfg.a == "exit":
        sys.exit(cfg.get("code", 3))
    if cfg.a == "other":
        return {"tokens": 5}
    if cfg.a == "hang":
        print("IN THE JOB", flush=True)
        time.sleep(600)
    return {"loss": 1.0 / cfg.b, "score": cfg.b}

main()
"""
PLAIN_CONFIG = """
defaults: [sweep: compare, _self_]
a: fine
b: 1
sweep: {metric: returned.score, direction: minimize}
"""

RANKS = (
    PLAIN.replace("import hydra", "import stagereg")
    .replace("hydra.main", "stagereg.main")
    .replace(
        '    return {"loss"',
        """    import torch, torch.distributed as dist
    if cfg.a == "killed" and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer = stagereg.instantiate(cfg.checkpoint)
    with checkpointer:
        for step in range(1, 5):
            dist.all_reduce(torch.ones(1))
            checkpointer.maybe_save(step, {"w": torch.ones(4)})
    return {"loss\"""",
    )
)
RANKS_CONFIG = """
defaults: [stagereg, sweep: compare, _self_]
a: fine
b: 1
nproc: 2
checkpoint: {every: 2}
"""

RESUMING = """
import hydra, torch, stagereg

@stagereg.main(config_path=".", config_name="app")
def main(cfg):
    state = {"w": torch.ones(4)}
    with stagereg.Checkpointer(cfg.dir, every=2, resume=cfg.resume) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, 5):
            checkpointer.maybe_save(step, state)
    print("RESULT", cfg.b, start, flush=True)

main()
"""
ONE_PROCESS = RESUMING.replace("stagereg.main(", 'hydra.main(version_base="1.3", ')


class App:
    """A folder with a program.

    Attributes:
        folder: of the program and its sweeps.
    """

    def __init__(self, folder: Path, script: str, config: str) -> None:
        self.folder = folder
        (folder / "app.py").write_text(script)
        (folder / "app.yaml").write_text(config)

    def run(
        self, *arguments: str, python: Path | str = sys.executable, limit_s: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run it, with warnings of Hydra's coming releases off; in a fork, unless by another Python."""
        if python == sys.executable:
            how: dict[str, Any] = {"timeout_s": limit_s, "environment": environment(), "ignores_warnings": True}
            how["forks_ranks"] = "nproc" in (self.folder / "app.yaml").read_text()
            return run_forked(Path("app.py"), *arguments, cwd=self.folder, **how)
        command = [str(python), "-W", "ignore", "app.py", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )

    def sweep(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a sweep into ``out``."""
        return self.run("-m", "hydra.sweep.dir=out", *arguments, **how)

    def results(self) -> list[dict[str, Any]]:
        """What the jobs of the sweep have left, in their order."""
        files = sorted((self.folder / "out").glob("*/result.json"), key=lambda file: int(file.parent.name))
        return [json.loads(file.read_text()) for file in files]


def environment() -> dict[str, str]:
    """That of a user's shell: nothing of this test run in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH", "COVERAGE"))}
    return kept | {"OMP_NUM_THREADS": "1"}
