"""The example of a third-party package: built, installed beside stagereg, and used by name from another folder."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from ..support.app import App
from ..support.wheels import build, environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
WIDTH = 32
SMALL = [f"width={WIDTH}", "train.steps=6", "train.uneven=2", "checkpoint.every=6", "export.every=3"]

# An app that imports neither package: it is Hydra that finds the options.
BARE = """
import hydra
@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(cfg):
    import torch
    staged = hydra.utils.instantiate(cfg.stager).stage({"w": torch.ones(3), "n": torch.tensor(1)})
    print("STAGED", staged["w"].dtype, staged["n"].dtype)
main()
"""
CONFIG = "defaults: [{stager: pinned_cached}, _self_]\nhydra: {output_subdir: null, run: {dir: out}}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("example"), EXAMPLE)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stagereg")
    return environment(folder, build("wheel", folder), wheel)


@pytest.fixture
def user(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    """A user with both packages installed, in a folder without access to the sources."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.copytree(EXAMPLE / "app", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("outputs", "multirun"))
    return App(tmp_path, {"conf/app.yaml": CONFIG, "bare.py": BARE}, python)


def weights(checkpoint: Path, *owner: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What plain torch reads of the network of the app."""
    shapes = {"0.weight": (WIDTH, 16), "0.bias": (WIDTH,), "2.weight": (WIDTH,), "3.weight": (WIDTH, WIDTH)}
    read = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    nested: dict = read
    for name in reversed(owner):
        nested = {name: nested}
    load(nested, checkpoint_id=checkpoint, no_dist=True)
    return read


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.name for path in (EXAMPLE / "lean_export").iterdir() if path.is_file()}
    assert shipped == {f"lean_export/{name}" for name in sources}
    assert "lean_export/py.typed" in shipped


@pytest.mark.slow
def test_listing_and_completion_offer_it_and_import_nothing(user: App) -> None:
    profiled = {"PYTHONPROFILEIMPORTTIME": "1"}
    done = user.run("-sc", "query=bash", script="bare.py", COMP_LINE="python bare.py stager=b", **profiled)
    assert done.stdout.split() == ["stager=bf16", "stager=blocking"]
    assert "Did you mean 'bf16'" in user.run("stager=bf61", script="bare.py").stderr
    staged = user.prints("stager=bf16", "stager.max_in_flight=3", script="bare.py")
    assert staged.endswith("STAGED torch.bfloat16 torch.int64\n")
    listed = user.run("stagereg", "list", "--json", script="-m", **profiled)
    for each in (done, listed):
        imported = {line.rpartition("|")[2].strip() for line in each.stderr.splitlines()}
        assert "stagereg.registry" in imported
        assert not {"torch", "lean_export"} & imported
    mine = {(e["kind"], e["name"]): e for e in json.loads(listed.stdout)["components"] if e["version"] == "1.0.0"}
    hooks = {("join_hook", "ema"), ("join_hook", "ddp_timed")}
    assert set(mine) == {
        ("stager", "bf16"),
        ("joinable", "ema"),
        ("on_commit", "journal"),
        ("tier", "local_ssd"),
        *hooks,
    }
    assert {e["distribution"] for e in mine.values()} == {"lean-export"}


@pytest.mark.slow
def test_checkpoints_and_exports_agree_in_plain_torch(user: App) -> None:
    printed = user.prints(*SMALL, "hydra.run.dir=run", script="finetune.py")
    assert "step 6 " in printed
    full, export = user.folder / "run/checkpoints/latest", user.folder / "run/export/latest"
    assert full.resolve().name == export.resolve().name == "step-00000006"
    averaged = weights(full, "ema", "weights", dtype=torch.float32)
    exported = weights(export, "model", dtype=torch.bfloat16)
    trained = weights(full, "model", dtype=torch.float32)
    for name, value in averaged.items():
        assert torch.equal(exported[name], value.to(torch.bfloat16)), name
        assert not torch.equal(value, trained[name]), name


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_resumes_from_its_checkpoint_to_the_same_average(user: App) -> None:
    ends = []
    for steps, folder in ((["6"], "whole"), (["3", "6"], "parts")):
        for number in steps:
            often = ["checkpoint.every=3", f"checkpoint.dir={user.folder}/{folder}", "train.uneven=0"]
            often += [f"train.steps={number}", f"hydra.run.dir={folder}/run{number}"]
            user.prints(*SMALL, *often, script="finetune.py")
        ends.append(weights(user.folder / folder / "latest", "ema", "weights", dtype=torch.float32))
    assert [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])] == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_its_own_tests_pass_and_its_types_hold(user: App) -> None:
    shutil.copytree(EXAMPLE / "tests", user.folder / "tests")
    assert " passed" in user.prints("pytest", "-q", "-p", "no:cacheprovider", "tests", script="-m")
    shutil.copytree(EXAMPLE / "lean_export", user.folder / "lean_export")
    shutil.copy(EXAMPLE / "pyproject.toml", user.folder)
    assert "no issues" in user.prints("mypy", script="-m")
