"""The error for an unknown name has the nearest known one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import pytest
import torch
from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import stagereg
import stagereg.base.providers as providers
from stagereg.config.suggestions import explain
from stagereg.errors import ConfigError, LaunchError
from stagereg.launch.main import main
from stagereg.registry import REGISTRY

from ..support.app import App


@pytest.fixture
def app(tmp_path: Path) -> Path:
    app = "defaults: [stagereg, {data: even}, _self_]\ntrain: {steps: 3, lr: 0.1}\n"
    return App(tmp_path, {"app.yaml": app, "data/even.yaml": "files: 3", "data/uneven.yaml": "files: 4"}).folder


def message_of(app: Path, *overrides: str) -> str:
    with (
        initialize_config_dir(str(app), version_base="1.3"),
        pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as caught,
    ):
        compose("app", overrides=[*overrides])
    with mock.patch("sys.argv", ["app.py", *overrides]):
        return explain(caught.value)


def test_a_component_that_is_not_there_may_be_in_a_module_that_plugins_has_to_name(app: Path) -> None:
    for unknown in ("half", "thrifty"):
        assert message_of(app, f"stager={unknown}").endswith(" name its module in the config: plugins: [my_module].")
    assert "plugins" not in message_of(app, "data=unevn")


@pytest.mark.parametrize(
    ("override", "folder"),
    [("tier=memory", "tiers"), ("storage=safetensors", "interop"), ("joinable@join.joinables.m=fsdp2", "joinables")],
)
def test_a_component_whose_extension_is_not_installed_names_the_folder(
    app: Path, override: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "has", lambda extension: extension != folder)
    monkeypatch.setattr(REGISTRY, "decorated", [])  # what other tests have imported
    REGISTRY._path = None
    try:
        message = message_of(app, f"+{override}" if "@" in override else override)
    finally:
        monkeypatch.undo()
        REGISTRY._path = None
    assert f"It needs stagereg/extensions/{folder}, which is missing in this installation: reinstall" in message


NO_NAME = "a config group takes the name of an option. For no option, write ~GROUP instead of GROUP=null"


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
            "stager.max_in_flight: Value 'many' of type 'str' could not be converted to Integer. It is: number of "
            "copies that",
        ),
        (
            "join.throw=maybe",
            "join.throw: Value 'maybe' is not a valid bool (type str). It is: when a rank runs out of",
        ),
        (
            "+join_hook=auto",
            "No join_hook named 'auto'. auto is a joinable: +joinable@join.joinables.NAME=auto.\nAvailable: ",
        ),
        ("throw=true", "the config takes no 'throw'. Write join.throw=true. It takes: "),
        ("resume=never", "the config takes no 'resume'. Write checkpoint.resume=never. It takes: "),
        ("every=10", "the config takes no 'every'. Write checkpoint.every=10. It takes: "),
        ("newest=5", "the config takes no 'newest'. Write checkpoint.keep.newest=5. It takes: "),
        ("files=5", "the config takes no 'files'. Write data.files=5. It takes: "),
        (
            "join_hook@join.joinables.model.hook=ddp",
            "the defaults of the config do not contain join_hook@join.joinables.model.hook, so it cannot be replaced. "
            "To add it, write "
            "+join_hook@join.joinables.model.hook=ddp",
        ),
        (
            "data@other=even",
            "the defaults of the config do not contain data@other, so it cannot be replaced. Did you mean data? "
            "To add it, write "
            "+data@other=even",
        ),
        (
            "on_commit=wandb",
            "the defaults of the config do not contain on_commit, so it cannot be replaced. To add it, write "
            "+on_commit@checkpoint.on_commit.NAME=wandb",
        ),
        (
            "rename={old: new}",
            "the config takes no 'rename'. Write 'checkpoint.restore.rename={old: new}'. It takes: ",
        ),
        (
            "checkpoint.allow_missing=[c.*]",
            "checkpoint/default takes no 'allow_missing'. Write 'checkpoint.restore.allow_missing=[c.*]'. It takes: ",
        ),
        ("tier=null", "to train without a tier, write tier=none"),
        ("stager=half", "No stager named 'half'.\nAvailable: blocking, "),
        ("data=unevn", "there is no data=unevn. Did you mean 'uneven'? Available: even, uneven"),
        (
            "stager=null",
            "checkpoints need a stager and a storage; to train without checkpoints, write checkpoint.enable=false",
        ),
        *((override, NO_NAME) for override in ("data=null", "+stager@other=null", "stager=3")),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_what_to_write(app: Path, override: str, line: str) -> None:
    assert message_of(app, override).startswith(line)


def test_a_name_that_several_parts_of_the_config_have_is_written_for_each(app: Path) -> None:
    said = message_of(app, "enable=false")
    assert "takes no 'enable'. Write checkpoint.enable=false or join.enable=false. It takes: " in said
    assert "To add it" not in said


def test_an_unknown_name_at_the_top_gets_the_nearest(app: Path) -> None:
    at_the_top = message_of(app, "stagerr=blocking")
    assert "Did you mean 'stager'?" in at_the_top
    assert "hydra" not in at_the_top


def test_a_program_that_initialises_the_group_is_an_error() -> None:
    @main()
    def train(cfg: Any) -> None:
        torch.distributed.init_process_group("gloo")

    with pytest.raises(LaunchError, match=r"calls init_process_group, but stagereg\.main has already initialised"):
        train(OmegaConf.create({}))


def test_a_misspelt_default_gets_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagerreg, _self_]\n")
    assert message_of(tmp_path, "x=1").endswith("'stagerreg' for the defaults of a config. Did you mean 'stagereg'?")


def test_a_dataclass_at_the_head_of_the_defaults_gets_the_fields_that_it_lacks() -> None:
    def composed(fields: list[tuple[str, Any, Any]], order: list[str]) -> Any:
        store = ConfigStore.instance()
        store.store("schema", dataclasses.make_dataclass("Schema", [("lr", float, 0.1), *fields]))
        store.store("typed", {"defaults": [*order, "_self_"]})
        with initialize(None, version_base="1.3"):
            return compose("typed", overrides=["nproc=2"])

    with pytest.raises(HydraException) as caught:
        composed([], ["schema", "stagereg"])
    message, _, fields = explain(caught.value).partition("List Schema after stagereg, or add to it: ")
    assert message.startswith("Schema takes no 'stager'. It takes: hydra, lr. Schema comes first in the defaults, so ")
    names = [each.removesuffix(": Any = MISSING") for each in fields.split("; ")]
    # Both ways out, as the message has them:
    ways = (
        composed([(name, Any, MISSING) for name in names], ["schema", "stagereg"]),
        composed([], ["stagereg", "schema"]),
    )
    assert [(each.nproc, each.lr, OmegaConf.get_type(each).__name__) for each in ways] == [(2, 0.1, "Schema")] * 2


def test_a_notebook_gets_what_to_write_for_the_directory_and_for_hydras_instantiate(tmp_path: Path) -> None:
    def composed(*overrides: str) -> Any:
        with initialize(None, version_base="1.3"):
            return compose("stagereg", overrides=[*overrides, "checkpoint.enable=false"]).checkpoint

    with pytest.raises(ConfigError, match="output directory: compose") as caught:
        stagereg.instantiate(composed())
    override = re.findall(r"compose\(\.\.\., overrides=\['(.*)PATH'\]\)", str(caught.value))
    config = composed(f"{override[0]}{tmp_path}")
    with pytest.raises(HydraException, match=r"checkpoint\.keep is a mapping, .* with stagereg\.instantiate\(cfg"):
        hydra.utils.instantiate(config)
    assert stagereg.instantiate(config).dir == tmp_path


def test_errors_about_something_else_are_left_alone(app: Path) -> None:
    assert message_of(app, "~nothing") == ""
    assert explain(ValueError("x")) == ""
