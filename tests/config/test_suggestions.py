"""The error for an unknown name has the nearest known one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from stagereg.config.suggestions import explain


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "even.yaml").write_text("files: 3\n")
    (tmp_path / "data" / "uneven.yaml").write_text("files: 4\n")
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, {data: even}, _self_]\ntrain: {steps: 3, lr: 0.1}\n")
    return tmp_path


def message_of(app: Path, override: str) -> str:
    with (
        initialize_config_dir(str(app), version_base="1.3"),
        pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as caught,
    ):
        compose("app", overrides=[override])
    return explain(caught.value)


def test_unknown_key_of_a_component_names_the_nearest_and_all(app: Path) -> None:
    assert message_of(app, "stager.pim=true").startswith(
        "stager/pinned_cached takes no 'pim'. Did you mean 'pin'? It takes: "
    )


def test_unknown_key_of_the_apps_own_config_names_the_nearest_and_how_to_add_it(app: Path) -> None:
    expected = "train takes no 'stepz'. Did you mean 'steps'? It takes: steps, lr. To add it, write +train.stepz=..."
    assert message_of(app, "train.stepz=5") == expected


def test_unknown_key_at_the_top_names_the_nearest_and_leaves_hydra_out(app: Path) -> None:
    line = message_of(app, "stagerr=blocking")
    assert "Did you mean 'stager'?" in line
    assert "hydra" not in line


def test_unknown_option_of_the_apps_own_group_names_the_nearest_and_all(app: Path) -> None:
    assert message_of(app, "data=unevn") == "there is no data=unevn. Did you mean 'uneven'? There is: even, uneven"


@pytest.mark.parametrize("override", ["stager=null", "data=null", "+stager@other=null", "stager=3"])
def test_the_error_for_a_group_without_a_name_shows_how_to_leave_it_out(app: Path, override: str) -> None:
    line = message_of(app, override)
    assert line == "a config group takes the name of an option. For none write ~GROUP, in place of GROUP=null"


@pytest.mark.parametrize("override", ["stager.max_in_flight=many", "join.throw=maybe", "~nothing"])
def test_errors_about_something_else_are_left_alone(app: Path, override: str) -> None:
    assert message_of(app, override) == ""
    assert explain(ValueError("x")) == ""
