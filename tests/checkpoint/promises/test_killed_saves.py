"""A process killed at any moment leaves complete checkpoints and hidden leftovers, nothing between."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.forks import run_forked

ROOT = Path(__file__).parents[3]
# The script imports torch once and forks a child for each moment, before torch has run any thread. A moment is a file
# system operation below the directory (Python's audit events); the child kills itself right before that one.
SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
import torch, torch.distributed.checkpoint
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.open_store import open_parent_store
from tests.support.forked import forked

root = Path(sys.argv[1])

def state(version):
    return {"x": torch.full((50,), float(version)), "version": version}

def prepare(prepared):
    with Checkpointer(str(prepared), keep=2) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))

def work(kill_at):
    checkpointer = Checkpointer(str(root), keep=2)
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.")) and str(root) in str(args):
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
    sys.addaudithook(hook)
    checkpointer.save(3 if sys.argv[2] == "a new step" else 2, state(3))
    checkpointer.close()

def check():
    for path in root.iterdir():
        if path.name.startswith("step-"):
            found = open_parent_store(path).look(str(path)).checkpoint
            assert isinstance(found, Checkpoint), (path, found)
    assert open_parent_store(root / "latest").look(str(root / "latest")).checkpoint
    restored = state(0)
    with Checkpointer(str(root)) as checkpointer:
        step = checkpointer.restore(restored)
        assert restored["version"] in (2, 3), restored
        assert step == (restored["version"] if sys.argv[2] == "a new step" else 2)
        assert (restored["x"] == restored["version"]).all()
        assert checkpointer.latest.name.startswith(f"step-{step:08d}")
    assert not [path for path in root.iterdir() if path.name.startswith(".")], os.listdir(root)

moment = 0
prepared = root.with_name("prepared")
assert forked(prepare, prepared) == 0
while True:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(prepared, root, symlinks=True)
    killed = forked(work, moment)
    assert killed in (0, signal.SIGKILL), killed
    if forked(check) != 0:
        sys.exit(f"killed at moment {moment}: {sorted(os.listdir(root))}")
    if killed == 0:
        break
    moment += int(sys.argv[3])
print(moment)
"""


EVERY_MOMENT = [pytest.param(what, 1, marks=pytest.mark.slow) for what in ("a step again", "a new step")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("what", "stride"), [("a step again", 9), *EVERY_MOMENT])
def test_a_kill_at_any_moment_leaves_complete_checkpoints(tmp_path: Path, what: str, stride: int) -> None:
    done = run_forked(SCRIPT, tmp_path / "run", what, stride, cwd=ROOT, timeout_s=380, ignores_warnings=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 20
