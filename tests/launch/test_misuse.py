"""What a user or the author of a plugin does wrong, on the command line: one message that says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..config.app import App

TRAIN = """
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch

    model = torch.nn.Linear(8, 4)
    state = {"model": model, "more": {"a": torch.ones(3), "b": 2}}
    stagereg.instantiate(cfg.join, model=model)
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        checkpointer.restore(state)
        for step in range(1, 7):
            checkpointer.maybe_save(step, state)


if __name__ == "__main__":
    train()
"""
CONFIG = "defaults: [stagereg, _self_]\nnproc: 1\ncheckpoint: {every: 2}\n"


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, {"app.py": TRAIN, "conf/app.yaml": CONFIG})


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
