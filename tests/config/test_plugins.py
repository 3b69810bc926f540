"""A module that a config or a command line names as a plugin makes its components options, wherever Hydra composes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

import stagereg
import stagereg.config.plugins as plugins
import stagereg.config.source as source
from stagereg import registry
from stagereg.config.plugins import PluginError
from stagereg.errors import StageregError

from ..support.app import STAGER, App

REGISTERED = f'import stagereg\n@stagereg.register("stager", "mine"){STAGER}'
MINE = f'import os\nprint("IMPORTED", __name__, os.environ.get("RANK"))\n{REGISTERED}'

# The first has no import of stagereg at all, like an app of a user who installed it.
APP = """
import os, sys, hydra
@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(cfg):
    line = f"BUILT {vars(hydra.utils.instantiate(cfg.stager))} {'torch' in sys.modules}\\n"
    os.write(1, line.encode())  # at once: workers of a sweep share the pipe
if __name__ == "__main__":
    main()
"""
TRAIN = """
import os, stagereg
@stagereg.main(config_path="conf", config_name="train")
def train(cfg):
    line = f"BUILT {vars(stagereg.instantiate(cfg.stager))} {os.environ['RANK']} {list(cfg.plugins)}\\n"
    os.write(1, line.encode())  # at once: ranks share the pipe
if __name__ == "__main__":
    train()
"""
QUIET = "hydra: {output_subdir: null, run: {dir: out}, sweep: {dir: out}}\n"


@pytest.fixture
def app(tmp_path: Path) -> App:
    """Beside the module that has its stager."""
    files = {"my_module.py": MINE, "app.py": APP, "train.py": TRAIN}
    files["conf/app.yaml"] = f"defaults: [{{stager: mine}}, _self_]\nplugins: [my_module]\n{QUIET}"
    return App(tmp_path, files | {"conf/train.yaml": f"defaults: [stagereg, _self_]\n{QUIET}"})


def test_a_run_has_the_options_of_a_module_that_its_config_names(app: App) -> None:
    assert app.prints("stager.slots=5") == "IMPORTED my_module None\nBUILT {'slots': 5} False\n"
    assert "_target_: my_module.Mine" in app.prints("--cfg", "job")


@pytest.mark.slow
def test_jobs_and_workers_of_a_sweep_have_them_too(app: App) -> None:
    out = app.prints("-m", "stager.slots=4,5", "hydra/launcher=joblib")
    assert "BUILT {'slots': 4} False" in out
    assert "BUILT {'slots': 5} False" in out


def test_tab_completes_their_names_and_prints_no_error(app: App) -> None:
    assert "stager=mine" in app.completes("stager=m")
    assert "stager.slots=" in app.completes("stager.s")
    app.write("conf/app.yaml", f"defaults: [{{stager: blocking}}, _self_]\nplugins: [no_such_module]\n{QUIET}")
    done = app.run("-sc", "query=bash", COMP_LINE="python app.py stager=bl")
    assert done.stdout.split() == ["stager=blocking"]
    assert "no_such_module" not in done.stderr


@pytest.mark.slow
def test_workers_of_a_sweep_have_what_the_command_line_names(app: App) -> None:
    app.write("conf/train.yaml", f"defaults: [stagereg, {{override stager: blocking}}, _self_]\n{QUIET}")
    line = ["-m", "stager=mine", "plugins=[my_module]", "nproc=2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]
    printed = app.prints(*line, "stager.slots=4,5", script="train.py")
    for slots in (4, 5):
        for rank in range(2):
            assert f"BUILT {{'slots': {slots}}} {rank} ['my_module']" in printed


def test_a_command_line_names_modules_a_wrong_one_is_an_error(app: App) -> None:
    ask, lines = ("-sc", "query=bash"), ("plugins=[my_module] stager=m", "plugins=[my_modu] np")
    done = app.run_many([("train.py", ask, f"python train.py {line}") for line in lines])
    assert [each.returncode for each in done] == [0, 0], done
    assert ["stager=mine" in done[0].stdout.split(), "nproc=" in done[1].stdout.split()] == [True, True]
    message = app.refuses("plugins=[my_modul]", script="train.py")
    assert (
        "The command line names the plugin 'my_modul', which cannot be imported. Did you mean 'my_module'?" in message
    )
    assert "Python searches the directory of the script, " in message


Composed = Callable[..., Any]


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Composed]:
    """Compose ``app`` in this process from files given by path, beside modules ``one``, ``two``, ``three``."""
    before = registry.REGISTRY.decorated
    monkeypatch.syspath_prepend(tmp_path)
    App(tmp_path, {f"{name}.py": REGISTERED.replace('"mine"', f'"{name}"') for name in ("one", "two", "three")})

    def composed(files: dict[str, str], *overrides: str) -> Any:
        App(tmp_path, files)
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
            return compose("app", [*overrides])

    yield composed
    for module in ("one", "two", "three", "broken", "leaves"):
        sys.modules.pop(module, None)
    kept = [each for each in registry.REGISTRY.decorated if each in before or each.name not in ("one", "two", "three")]
    registry.REGISTRY.decorated = kept


CHOICE = "defaults: [{stager: one}, _self_]\n"


def test_configs_of_the_root_before_the_choice_may_name_modules(composed: Composed) -> None:
    files = {
        "conf/app.yaml": "defaults: [sub/base, {stager: three}, {experiment: x}, _self_]\nplugins: [one]\n",
        "conf/sub/base.yaml": "# @package _global_\ndefaults: [more, _self_]\n",
        "conf/sub/more.yaml": "# @package _global_\ndefaults: [/last]\n",
        "conf/last.yaml": "plugins: [two]\n",
        "conf/experiment/x.yaml": "# @package _global_\nplugins: [three]\n",
    }
    config = composed(files, "+stager@a: one".replace(": ", "="), "+stager@b=two")
    assert [config[key]._target_ for key in ("stager", "a", "b")] == ["three.Mine", "one.Mine", "two.Mine"]
    assert config.plugins == ["one"]


def test_main_imports_what_its_config_names(composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagereg.launch.main.alone", lambda task, cfg: task(cfg))
    build = stagereg.main()(lambda cfg: stagereg.build("stager", "one"))
    with pytest.raises(stagereg.StageregError, match="No stager named 'one'"):
        build(OmegaConf.create({"a": 1}))
    assert type(build(OmegaConf.create({"plugins": ["one"]}))).__module__ == "one"
    with pytest.raises(PluginError, match=r"^The config names the plugin 'no_such_module'"):
        build(OmegaConf.create({"plugins": ["no_such_module"]}))


def test_plugins_of_a_part_of_the_config_are_that_parts_own(composed: Composed) -> None:
    files = {
        "conf/app.yaml": "defaults: [{stager: one}, {trainer: x}, {trainer@b: y}, part, _self_]\nplugins: [one]\n",
        "conf/trainer/x.yaml": "plugins: [no_such_module, 7]\n",
        "conf/trainer/y.yaml": "# @package a\nplugins: [no_such_module, 7]\n",
        "conf/part.yaml": "# @package c\nplugins: [no_such_module, 7]\n",
    }
    config = composed(files)
    assert config.trainer.plugins == config.b.plugins == config.c.plugins == ["no_such_module", 7]
    assert config.stager._target_ == "one.Mine"


def test_an_app_without_our_options_may_use_the_key_otherwise(composed: Composed) -> None:
    for value in ("[no_such_module, one]", "{a: 1}", "some text", "${nowhere}", "[{name: one}]"):
        assert "plugins" in composed({"conf/app.yaml": f"plugins: {value}\n"})
    assert "one" not in sys.modules
    assert composed({"conf/app.yaml": "defaults: [{optional stager: x}, _self_]\nplugins: {a: 1}\n"}).plugins == {
        "a": 1
    }


def test_a_structured_config_may_name_modules(composed: Composed) -> None:
    @dataclass
    class Structured:
        plugins: list[str] = field(default_factory=lambda: ["one"])
        stager: Any = None

    ConfigStore.instance().store(name="plugins_of_a_class", node=Structured)
    for text in (
        "defaults: [plugins_of_a_class, {stager: one}, _self_]\n",
        f"{CHOICE}plugins: ['${{which}}']\nwhich: one\n",
    ):
        assert composed({"conf/app.yaml": text}).stager._target_ == "one.Mine"


NO_LIST = "plugins must be a list of modules: plugins=[my_module]"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[no_such_module]", "The config 'app' names the plugin 'no_such_module', which cannot be imported. Python "),
        ("[twoo]", "cannot be imported. Did you mean 'two'?"),
        ("[3]", "the plugin '3', which cannot be imported."),
        ("two", f"The config 'app' has plugins=two, but {NO_LIST}"),
        ("${nowhere}", f"has plugins=(Interpolation key 'nowhere' not found), but {NO_LIST}"),
        ("[broken]", "ZeroDivisionError: division by zero ("),
        ("[leaves]", "SystemExit: 3 ("),
    ],
)
def test_a_name_that_is_no_module_is_an_error(composed: Composed, value: str, message: str) -> None:
    files = {"conf/app.yaml": f"{CHOICE}plugins: {value}\n", "broken.py": "1 / 0", "leaves.py": "raise SystemExit(3)"}
    for _ in range(2):  # raised again when composed again
        with pytest.raises(PluginError) as caught:
            composed(files)
        assert message in str(caught.value)
        assert isinstance(caught.value, StageregError)
        assert isinstance(caught.value, HydraException)


def test_unpickling_the_source_imports_its_modules(composed: Composed) -> None:
    composed({"conf/app.yaml": f"{CHOICE}plugins: [one]\n"})
    sent = pickle.dumps(source.RegistrySource("stagereg", "stagereg://"))
    del sys.modules["one"]
    pickle.loads(sent)
    assert "one" in sys.modules


def test_hydra_reports_a_config_that_cannot_be_read_for_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config_path: str) -> None:
        raise OSError(config_path)

    monkeypatch.setattr(plugins, "note", fails)
    assert not source.RegistrySource("stagereg", "stagereg://plugins").is_config("app")


def test_every_way_to_write_the_override_is_read(composed: Composed) -> None:
    for name, override in {
        "one": "plugins=[one]",
        "two": "++plugins=['two']",
        "three": "plugins=[one],[three]",
    }.items():
        plugins.from_overrides(["stager=blocking", "~plugins", "x.plugins=[no_such_module]", "plugins=[one", override])
        assert name in stagereg.names("stager")
    for override in ("plugins=one", "plugins=one,two", "plugins=[no_such_module]", "plugins=[3]"):
        with pytest.raises(
            PluginError, match=r"^The command line (has plugins=\w+, but plugins must be a list|names the plugin)"
        ):
            plugins.from_overrides([override])
