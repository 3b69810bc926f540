"""The error for an unknown name has the nearest known one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from stagereg.config.suggestions import explain

from .app import App


@pytest.fixture
def app(tmp_path: Path) -> Path:
    app = "defaults: [stagereg, {data: even}, _self_]\ntrain: {steps: 3, lr: 0.1}\n"
    return App(tmp_path, {"app.yaml": app, "data/even.yaml": "files: 3", "data/uneven.yaml": "files: 4"}).folder


def message_of(app: Path, override: str) -> str:
    with (
        initialize_config_dir(str(app), version_base="1.3"),
        pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as caught,
    ):
        compose("app", overrides=[override])
    return explain(caught.value)


NO_NAME = "a config group takes the name of an option. For none write ~GROUP, in place of GROUP=null"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stager.pim=true", "stager/pinned_cached takes no 'pim'. Did you mean 'pin'? It takes: "),
        (
            "train.stepz=5",
            "train takes no 'stepz'. Did you mean 'steps'? It takes: steps, lr. To add it, write +train.stepz=...",
        ),
        ("data=unevn", "there is no data=unevn. Did you mean 'uneven'? There is: even, uneven"),
        *((override, NO_NAME) for override in ("stager=null", "data=null", "+stager@other=null", "stager=3")),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_what_to_write(app: Path, override: str, line: str) -> None:
    assert message_of(app, override).startswith(line)
    at_the_top = message_of(app, "stagerr=blocking")
    assert "Did you mean 'stager'?" in at_the_top
    assert "hydra" not in at_the_top


@pytest.mark.parametrize("override", ["stager.max_in_flight=many", "join.throw=maybe", "~nothing"])
def test_errors_about_something_else_are_left_alone(app: Path, override: str) -> None:
    assert message_of(app, override) == ""
    assert explain(ValueError("x")) == ""
