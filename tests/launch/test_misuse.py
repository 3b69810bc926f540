"""What a user or the author of a plugin does wrong, on the command line: one message that says what to write."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ..config.app import App

TRAIN = """
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    state = {"model": model, "more": {"a": torch.ones(3), "b": 2}}
    stagereg.instantiate(cfg.join, model=model)
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        checkpointer.restore(state)
        for step in range(1, 7):
            checkpointer.maybe_save(step, state)


if __name__ == "__main__":
    train()
"""
MINE = """
import time
import stagereg
from stagereg.stagers.blocking import BlockingStager

class Base(BlockingStager):
    def __init__(self, n: int = 3):
        super().__init__()

@stagereg.register("stager", "raises")
class Raises(Base):
    def stage(self, state_dict): raise KeyError("no cheese")

@stagereg.register("stager", "nothing")
class Nothing(Base):
    def stage(self, state_dict): pass

@stagereg.register("stager", "less")
class Less(Base):
    def stage(self, state_dict): return {k: v for k, v in super().stage(state_dict).items() if k != "more"}

@stagereg.register("stager", "hangs")
class Hangs(Base):
    def stage(self, state_dict): time.sleep(600)
"""
CONFIG = "defaults: [stagereg, _self_]\nnproc: 1\ncheckpoint: {every: 2}\n"


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, {"app.py": TRAIN, "mine.py": MINE, "conf/app.yaml": CONFIG})


def test_a_joinable_or_hook_goes_where_a_join_looks_for_it(app: App) -> None:
    joinable, hook, below = app.run_each(
        ("+joinable=ddp",), ("+join_hook=ddp",), ("+join_hook@join.joinables.model.hook=ddp",)
    )
    named = "where NAME is the joinable's, as in stagereg.instantiate(cfg.join, NAME=...)."
    unused = "stagereg: +{0}=ddp has no effect: no join looks for a {0} at the top of the config. Write +{0}@{1}=ddp, "
    assert app.refusal(joinable) == f"{unused.format('joinable', 'join.joinables.NAME')}{named}\n"
    assert app.refusal(hook) == f"{unused.format('join_hook', 'join.joinables.NAME.hook')}{named}\n"
    assert app.refusal(below).endswith(
        "where the config of a joinable (+joinable@join.joinables.model=NAME, without + if one is chosen; for none "
        "~joinable@join.joinables.model) is needed.\n"
    )


def test_a_stager_that_fails_is_named_with_its_line(app: App) -> None:
    lines = [("plugins=[mine]", f"stager={name}") for name in ("raises", "nothing", "less")]
    raises, nothing, less = [app.refusal(each) for each in app.run_each(*lines)]
    line = 1 + MINE.splitlines().index('    def stage(self, state_dict): raise KeyError("no cheese")')
    where = f"({app.folder / 'mine.py'}:{line}), raised in stage() of mine.Raises"
    assert f"rank 0: Step 2 was not saved: KeyError: 'no cheese' {where}\n" in raises
    assert ": stage() of mine.Nothing returned None, and has to return a copy of its dict. This run has no " in nothing
    assert ": stage() of mine.Less returned a copy without 'more'. This run has no complete checkpoint" in less


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_stager_that_hangs_ends_the_run_within_the_timeout(nproc: int, app: App) -> None:
    began = time.monotonic()
    done = app.run("plugins=[mine]", "stager=hangs", "checkpoint.timeout=2s", f"nproc={nproc}")
    assert done.returncode == 1
    assert time.monotonic() - began < 60
    said = (
        "rank 0: Step 2 was not saved: stage() of mine.Hangs has not returned for 2 s (checkpoint.timeout). This run "
    )
    assert f"stagereg: {said}has no complete checkpoint" in done.stderr
