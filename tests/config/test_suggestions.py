"""The error for an unknown name has the nearest known one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagereg.config.suggestions import explain
from stagereg.errors import LaunchError
from stagereg.launch.main import main

from ..support.app import App


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


def test_a_component_that_is_not_there_may_be_in_a_module_that_plugins_has_to_name(app: Path) -> None:
    for unknown in ("half", "thrifty"):
        assert message_of(app, f"stager={unknown}").endswith(" its module, plugins: [my_module].")
    assert "plugins" not in message_of(app, "data=unevn")


NO_NAME = "a config group takes the name of an option. For none write ~GROUP, in place of GROUP=null"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stager.pim=true", "stager/overlapped takes no 'pim'. Did you mean 'pin'? It takes: "),
        (
            "train.stepz=5",
            "train takes no 'stepz'. Did you mean 'steps'? It takes: steps, lr. To add it, write +train.stepz=...",
        ),
        (
            "stager.max_in_flight=many",
            "stager.max_in_flight: Value 'many' of type 'str' could not be converted to Integer. It is: copies that",
        ),
        (
            "join.throw=maybe",
            "join.throw: Value 'maybe' is not a valid bool (type str). It is: when a rank runs out of",
        ),
        (
            "+join_hook=auto",
            "there is no join_hook=auto. auto is a joinable: +joinable@join.joinables.NAME=auto. There is: ",
        ),
        ("stager=half", "there is no stager=half. There is: blocking, "),
        ("data=unevn", "there is no data=unevn. Did you mean 'uneven'? There is: even, uneven"),
        *((override, NO_NAME) for override in ("stager=null", "data=null", "+stager@other=null", "stager=3")),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_what_to_write(app: Path, override: str, line: str) -> None:
    assert message_of(app, override).startswith(line)
    at_the_top = message_of(app, "stagerr=blocking")
    assert "Did you mean 'stager'?" in at_the_top
    assert "hydra" not in at_the_top


def test_a_program_that_initialises_the_group_is_an_error() -> None:
    @main()
    def train(cfg: Any) -> None:
        torch.distributed.init_process_group("gloo")

    with pytest.raises(LaunchError, match=r"calls init_process_group, and stagereg\.main has done that already"):
        train(OmegaConf.create({}))


def test_a_misspelt_default_gets_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagerreg, _self_]\n")
    assert message_of(tmp_path, "x=1").endswith("'stagerreg' for the defaults of a config. Did you mean 'stagereg'?")


def test_errors_about_something_else_are_left_alone(app: Path) -> None:
    assert message_of(app, "~nothing") == ""
    assert explain(ValueError("x")) == ""
