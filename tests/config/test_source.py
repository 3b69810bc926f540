"""Registered components are options of any Hydra app: listed, completed, typed, and an error when misspelt."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagereg.base.providers import has
from stagereg.config.plugins import NAMED

from ..support.app import STAGER, App

THEIRS = f"""{STAGER}
class Stager(Mine):
    def __init__(self, slots: int = 2, pin: bool = False): self.slots, self.pin = slots, pin
class Other(Mine):
    def __init__(self, path: str = 'here'): self.path = path
"""

# No torch and no import of stagereg: an app of a user who installed both packages.
APP = """
import sys, hydra
@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(cfg):
    built = hydra.utils.instantiate(cfg.stager)
    print("BUILT", {k: v for k, v in vars(built).items()}, "torch" in sys.modules, "broken" in sys.modules)
main()
"""

CONFIG = """
defaults: [{stager: theirs}, _self_]
hydra: {output_subdir: null, run: {dir: out}, sweep: {dir: out}, job_logging: {root: {handlers: [console]}}}
"""

METADATA = "Metadata-Version: 2.1\nName: theirs\nVersion: 1.2\n"
POINTS = "stager.theirs = theirs:Stager\nstager.other = theirs:Other\nstager.broken = broken:Stager\n"


@pytest.fixture
def app(tmp_path: Path) -> App:
    """Beside an installed package with two stagers and a broken one."""
    files = {"app.py": APP, "conf/app.yaml": CONFIG, "site/theirs.py": THEIRS, "site/broken.py": "import nowhere"}
    info = {"METADATA": METADATA, "entry_points.txt": f"[stagereg.plugins]\n{POINTS}"}
    return App(tmp_path, files | {f"site/theirs-1.2.dist-info/{name}": text for name, text in info.items()})


def test_choosing_an_option_imports_nothing_else(app: App) -> None:
    assert app.prints("stager.slots=5") == "BUILT {'slots': 5, 'pin': False} False False\n"
    out = app.prints("-m", "stager=theirs,other")
    assert "BUILT {'slots': 2, 'pin': False} False False" in out
    assert "BUILT {'path': 'here'} False False" in out


def test_tab_completes_groups_options_and_fields_without_torch(app: App) -> None:
    lines = ("sta", "stager=", "stager=the", "stager.s", "stager=other stager.p", "+checkpoint/keep=")
    group, options, option, field, of_another, kept = app.completes_each(*lines)
    assert "stager=" in group
    assert {"stager=theirs", "stager=other", "stager=pinned_cached"} <= set(options)
    assert option == ["stager=theirs"]
    assert set(field) == {"stager.slots="}
    assert of_another == ["stager.path="]
    assert {each.rpartition("=")[2] for each in kept} == {
        "newest",
        "best",
        "policy",
        "proven",
    }  # presets and components


PARTS = """
import hydra
@hydra.main(config_path="conf", config_name="parts", version_base="1.3")
def main(cfg):
    print("PARTS", {name: part._target_.split(".")[-1] for name, part in cfg.parts.items()})
main()
"""


@pytest.mark.slow
def test_an_option_is_offered_at_any_package(app: App) -> None:
    app.write("conf/parts.yaml", CONFIG.replace("{stager: theirs}", "{stager@parts.a: theirs}"))
    app.write("app.py", PARTS)
    chosen, added = app.completes_each("stager@parts.a=the", "+stager@parts.b=oth")
    assert (chosen, added) == (["stager@parts.a=theirs"], ["+stager@parts.b=other"])
    assert app.completes_each("+stager@parts.b=other parts.b.p") == [["parts.b.path="]]
    assert "No stager named 'thiers'. Did you mean 'theirs'?" in app.refuses("stager@parts.a=thiers")
    out = app.prints("-m", "stager@parts.a=theirs,other", "+stager@parts.b=theirs", "parts.b.slots=5")
    assert "PARTS {'a': 'Stager', 'b': 'Stager'}" in out
    assert "PARTS {'a': 'Other', 'b': 'Stager'}" in out


BUILT_IN = ["blocking", "overlapped", "pinned_cached", *(["torch_default"] if has("interop") else [])]
STAGERS = sorted([*BUILT_IN, "broken", "other", "theirs"])  # the others are of the packages installed above


def test_help_info_and_cfg_show_the_options(app: App) -> None:
    lines = (("--help",), ("--info", "searchpath"), ("--info", "defaults"), ("--cfg", "job", "--package", "stager"))
    shown, sources, defaults, config = app.prints_each(*lines)
    assert f"stager: {', '.join(STAGERS)}" in shown
    assert "slots: 2" in shown
    assert "stagereg://" in sources
    assert "stager/theirs" in defaults
    assert config.endswith("_target_: theirs.Stager\nslots: 2\npin: false\n")


def test_a_misspelt_option_gets_the_nearest_or_hydras_list(app: App) -> None:
    app.write("conf/stager/mine.yaml", "a: 1")
    app.write("more/stager/theirs2.yaml", "defaults: [theirs, _self_]\nslots: 7\n")  # near a name of the registry
    search = f"hydra.searchpath=[{app.folder}/more]"
    near, far, other = app.run_each(("stager=pinned_cahced",), ("stager=zzz",), ("stager=theirs2", search))
    listed = f"Available: {', '.join(STAGERS)}\n"
    assert f"No stager named 'pinned_cahced'. Did you mean 'pinned_cached'?\n{listed}{NAMED}" in app.refusal(near)
    for line in ("Could not find 'stager/zzz'", "\tmine\n", "\tpinned_cached\n"):
        assert line in app.refusal(far)
    assert other.stdout.startswith("BUILT {'slots': 7")


def test_a_broken_package_is_named_only_when_chosen(app: App) -> None:
    assert app.prints().startswith("BUILT")
    message = app.refuses("stager=broken")
    assert "stager 'broken' cannot be loaded from broken:Stager of theirs 1.2" in message
    assert "No module named 'nowhere'" in message


FULL_ERROR = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"

# A typed config goes through a pickle, as to the workers of a launcher.
PICKLED = """
import pickle
from hydra import compose, initialize
with initialize("conf", version_base="1.3"):
    config = pickle.loads(pickle.dumps(compose("app", ["stager=other@rival"])))
    try:
        config.stager.path2 = 1
    except AttributeError:  # still typed
        print(config.stager.path)
"""


@pytest.mark.slow
def test_one_name_of_two_packages_is_two_options(app: App) -> None:
    app.write("site/rival.py", THEIRS.replace("'here'", "'there'"))
    app.write("site/rival-3.dist-info/METADATA", "Metadata-Version: 2.1\nName: Rival\nVersion: 3\n")
    app.write("site/rival-3.dist-info/entry_points.txt", "[stagereg.plugins]\nstager.other = rival:Other\n")
    assert app.completes("stager=other") == ["stager=other@rival", "stager=other@theirs"]
    out = app.prints("-m", "stager=other@theirs,other@rival")
    assert out.index("BUILT {'path': 'here'} False") < out.index("BUILT {'path': 'there'} False")
    message = "2 installed packages provide stager/other. Write one of: other@rival or other@theirs\n"
    assert app.refuses("stager=other") == app.refuses("-m", "stager=other,theirs") == message + FULL_ERROR
    app.write("app.py", PICKLED)
    assert app.prints() == "there\n"
