"""What is shipped: the right files and no others, working from any folder, as a wheel and as an editable install."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from stagereg import cli

from .support.app import App
from .support.wheels import ROOT, build, environment, plain, run

# The train.py of a user: own folder, own config, nothing of the checkout on the path.
TRAIN = """
import stagereg, torch
@stagereg.main(config_path="conf", config_name="app")
def main(cfg):
    staged = stagereg.instantiate(cfg.stager).stage({"w": torch.ones(2)})
    print("STAGED", staged["w"].tolist(), cfg.stager._target_, cfg.join.throw, cfg.checkpoint.every)
main()
"""

BARE = """
import hydra
@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(cfg):
    print("COMPOSED", cfg.stager._target_)
main()
"""

SWEPT = """
import hydra
@hydra.main(config_path="conf", config_name="swept")
def main(cfg):
    print("HYDRA", hydra.__version__)
    return float(cfg.a)
main()
"""

CONFIG = "defaults: [stagereg, _self_]\nhydra: {output_subdir: null, run: {dir: out}}\n"


COMPILED = ("stagereg/kernel/_copy", "stagereg/base/_tensors")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    return environment(wheel.parent, wheel)


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it is built where no C compiler works."""
    return build("wheel", tmp_path_factory.mktemp("uncompiled"), CC="/bin/false")


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editable")
    return environment(folder, build("editable", folder))


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return App(tmp_path, {"conf/app.yaml": CONFIG, "train.py": TRAIN, "bare.py": BARE}).folder


def test_the_wheel_has_every_module_and_config_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    shipped = {name for name in names if not name.startswith(COMPILED)}
    program, plugin = ROOT / "examples", ROOT / "examples" / "plugin"
    own = [p for p in (ROOT / "stagereg").rglob("*.py*") if p.suffix != ".pyc"]
    own += [p for p in (ROOT / "stagereg/sweep/render/templates").rglob("*") if p.is_file()]
    own += (ROOT / "stagereg/sweep/conf").rglob("*.yaml")
    conf = [p for p in (ROOT / "conf").rglob("*") if p.suffix in (".py", ".yaml")]
    copied = [plugin / "pyproject.toml", *plugin.glob("lean_export/*.py"), *plugin.glob("tests/*.py")]
    expected = {p.relative_to(ROOT).as_posix() for p in own} | {"stagereg/py.typed", "hydra_plugins/stagereg_plugin.py"}
    expected |= {f"stagereg/{p.relative_to(ROOT).as_posix()}" for p in conf}
    expected |= {f"stagereg/example/{p.relative_to(plugin).as_posix()}" for p in copied}
    copied = [program / "train.py", *(program / "conf").rglob("*.yaml")]
    expected |= {f"stagereg/program/{p.relative_to(program).as_posix()}" for p in copied}
    assert shipped == expected


STAGE = """
import stagereg, stagereg.base.many_tensors as tensors, stagereg.kernel.compiled as compiled, torch
state = {str(i): torch.randn(1000) for i in range(3000)}
staged = stagereg.build("stager", "pinned_cached").stage(state)
print(bool(compiled.way), tensors._torch is not None, all(torch.equal(staged[name], x) for name, x in state.items()))
"""


@pytest.mark.slow
def test_a_wheel_is_built_with_and_without_a_compiler(
    wheel: Path, installed: Path, uncompiled: Path, tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    for each, count in ((wheel, len(COMPILED)), (uncompiled, 0)):
        found = [name for name in zipfile.ZipFile(each).namelist() if name.startswith(COMPILED)]
        assert len(found) == count
        assert all(name.endswith(".so") for name in found)
    plain = environment(uncompiled.parent, uncompiled)
    for python, is_compiled in ((installed, True), (plain, False)):
        assert run(python, "-c", STAGE, cwd=tmp_path) == f"{is_compiled} {is_compiled} True\n"


@pytest.mark.slow
def test_an_editable_install_is_compiled(editable: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    assert run(editable, "-c", STAGE, cwd=tmp_path) == "True True True\n"


@pytest.mark.slow
@pytest.mark.parametrize("install", ["installed", pytest.param("editable", marks=pytest.mark.slow)])
def test_programs_run_and_one_without_the_import_has_the_options(
    install: str, app: Path, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue(install)
    out = run(python, "train.py", "stager=blocking", "join.throw=true", "checkpoint.every=5", cwd=app)
    assert "STAGED [1.0, 1.0] stagereg.stagers.blocking.BlockingStager True 5" in out
    out = run(python, "bare.py", "stager=blocking", cwd=app)
    assert "COMPOSED stagereg.stagers.blocking.BlockingStager" in out
    code = "import importlib.util as u; print([n for n in ('conf', 'tests', 'examples', 'stagereg') if u.find_spec(n)])"
    (app / "conf").rename(app / "of_app")
    assert run(python, "-c", code, cwd=app) == "['stagereg']\n"


@pytest.mark.parametrize("hydra", ["1.3", "1.4"])
@pytest.mark.parametrize(
    ("config", "given"),
    [
        ("defaults: [stagereg, sweep: compare, _self_]", ("sweep.metric=loss",)),
        ("defaults: [stagereg, _self_]", ("hydra/callbacks=compare",)),
        ("{}", ("hydra/callbacks=compare", "hydra/sweeper=interleaved")),
    ],
    ids=["sweep", "callback", "sweeper"],
)
def test_the_options_of_sweeps_are_found_by_their_names(
    hydra: str, config: str, given: tuple[str, ...], installed: Path, app: Path
) -> None:
    variables = {}
    if hydra == "1.4":
        if not (found := list(Path(sys.prefix, "hydra-1.4", "lib").glob("python*/site-packages"))):
            pytest.skip("make makes the environment of Hydra 1.4")
        variables["PYTHONPATH"] = str(found[0])  # before the Hydra that the environment borrows
    (app / "conf" / "swept.yaml").write_text(f"{config}\n")
    (app / "swept.py").write_text(SWEPT)
    out = run(installed, "swept.py", "-m", *given, "+a=1,2", "hydra.sweep.dir=out", cwd=app, **variables)
    assert f"HYDRA {hydra}." in out
    assert "Job 2 of 2" in out, "by the sweeper of stagereg"
    assert "2 rows, ranked by " in out
    assert {"sweep.json", "compare.csv", "report.html"} <= {path.name for path in (app / "out").iterdir()}


@pytest.mark.slow
def test_a_checkout_that_is_only_on_the_path_offers_its_options(app: Path) -> None:
    code = f"""
import sys, runpy
sys.path[:] = [{str(ROOT)!r}, *(path for path in sys.path if "editable" not in path)]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import stagereg
sys.argv = ["bare.py", "--info", "defaults"]
runpy.run_path("bare.py", run_name="__main__")
"""
    assert "stager/overlapped" in run(sys.executable, "-c", code, cwd=app)


def test_a_foreign_stagereg_in_the_folder_is_an_error(installed: Path, tmp_path: Path) -> None:
    (site,) = (installed.parents[1] / "lib").glob("python*/site-packages")
    foreign, tried = site / "stagereg-2.0.nothing", [installed, "-c", "import stagereg"]
    foreign.mkdir()
    try:
        run(*tried, cwd=tmp_path)
        foreign = foreign.rename(site / "stagereg-2.0.dist-info")
        done = subprocess.run(tried, cwd=tmp_path, env=plain(), capture_output=True, text=True, timeout=60)
    finally:
        foreign.rmdir()
    assert done.returncode != 0
    *_, two, do = done.stderr.splitlines()
    assert two.startswith(f"stagereg.errors.InstallationError: Two projects are installed in {site / 'stagereg'}")
    assert foreign.name in two
    assert (
        do == "Next to the checkout, run: pip uninstall stagereg && pip install --force-reinstall --no-deps ./stagereg"
    )
    assert len(done.stderr.splitlines()) < 15


PUBLIC = """
import pickle, stagereg, sys
assert stagereg.ByteSize("1KiB") == 1024
assert stagereg.names("stager")
assert not {"torch", "hydra", "omegaconf", "numpy"} & set(sys.modules)
for name in stagereg.__all__:
    assert getattr(getattr(stagereg, name), "__name__", name).rpartition(".")[2] == name
assert pickle.loads(pickle.dumps(stagereg.build)) == stagereg.build
from stagereg import *
assert main is stagereg.main
assert dir(stagereg) == sorted(stagereg.__all__)
"""


@pytest.mark.slow
def test_every_public_name_is_that_of_the_stub(installed: Path, tmp_path: Path) -> None:
    run(installed, "-c", PUBLIC, cwd=tmp_path)


def test_the_constraints_pin_every_dependency_and_extra() -> None:
    names = ("constraints.txt", "constraints-frameworks.txt", "constraints-stores.txt")
    lines = [line for name in names for line in (ROOT / name).read_text().lower().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Three of its own, and what these bring anyway.
    core = {"torch", "hydra-core", "omegaconf"} | {"fsspec", "jinja2", "packaging"}
    assert {re.split(r"[^\w-]", need)[0] for need in project["dependencies"]} == core
    extras = [need for extra in project["optional-dependencies"].values() for need in extra]
    asked = {re.split(r"[^\w-]", need)[0].lower() for need in (*project["dependencies"], *extras)}
    asked.remove("hydra-stagereg")
    assert asked <= set(pins)


def test_the_entry_points_of_commands_are_those_of_a_checkout() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["stagereg.commands"] == cli.BUILT_IN
