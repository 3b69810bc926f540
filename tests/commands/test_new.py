"""A new package: its tests pass as installed, it is complete or absent, and its name is any legal one."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

import stagereg.commands.scaffold as scaffold
from stagereg.errors import ConfigError

from ..support.wheels import ROOT, build, environment
from .conftest import Command

KINDS = ("stager", "joinable", "join_hook", "on_commit", "keep", "storage", "tier")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind, made by an installed stagereg and installed beside it in ``venv``."""
    folder = tmp_path_factory.mktemp("new")
    python = environment(folder, build("wheel", folder))
    for kind in KINDS:
        done = run(python, "-m", "stagereg", "new", kind, f"my_{kind}", "--dir", "packages", cwd=folder)
        assert done.returncode == 0, done.stderr
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    editable = [part for package in sorted((folder / "packages").iterdir()) for part in ("--editable", package)]
    done = run(*pip, "--no-build-isolation", *editable, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def python(made: Path) -> Path:
    return made / "venv" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_its_own_tests_and_check(kind: str, made: Path, python: Path) -> None:
    folder = made / "packages" / f"my-{kind.replace('_', '-')}"
    tests = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    check = run(python, "-m", "stagereg", "check", folder.name, "--json", cwd=made)
    assert check.returncode == 0, check.stdout + check.stderr
    seen = json.loads(check.stdout)
    assert seen["kept"]
    kept = [case["name"] for case in seen["cases"] if case["verdict"] == "kept"]
    passed = re.search(r"(\d+) passed", tests.stdout)
    assert passed
    assert {"metadata", "loads"} < set(kept)
    assert int(passed[1]) > sum(name.startswith("test_") for name in kept) >= 6


@pytest.mark.slow
def test_a_new_program_trains_without_a_checkout(made: Path, python: Path) -> None:
    new = run(python, "-m", "stagereg", "new", "program", "demo", "--dir", "programs", cwd=made)
    assert new.returncode == 0, new.stderr
    small = ("train.steps=4", "train.eval_every=4", "model.layers=1", "data.files=2", "checkpoint.every=2")
    done = run(python, "train.py", *small, "checkpoint.dir=kept", cwd=made / "programs" / "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (made / "programs" / "demo" / "kept" / "step-00000004").is_dir()
    assert (made / "programs" / "demo" / "train.py").read_text() == (ROOT / "examples" / "train.py").read_text()


names = st.from_regex(r"\A[a-z]([a-z0-9_]{0,26}[a-z0-9])?\Z")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), name=names | st.sampled_from(["fsdp2", "a_join", "hook"]))
@example(kind="joinable", name="my_joinable")
def test_a_package_of_any_legal_name_is_whole(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        folder = scaffold.make(kind, name, tmp_path_factory.mktemp("any"))
    except ConfigError:  # the few that are taken; refusing more than a few would be found out here, too
        reject()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for group in ("stagereg.plugins", "stagereg.contracts"):
        for announced, target in project["entry-points"][group].items():
            assert announced.partition(".")[2] == name
            module, _, component = target.partition(":")
            source = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text())
            classes = {node.name for node in source.body if isinstance(node, ast.ClassDef)}
            imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
            assert component in classes
            assert not classes & {alias.name for node in imports for alias in node.names}
    texts = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert not any(
        re.search(r"lean.export|Bf16|\bEma|ddp_timed|TimedDdp|[Jj]ournal|[Tt]hinned|[Zz]ipped|local_ssd|LocalSsd", text)
        for text in texts
    )
    assert all(ast.parse(file.read_text()) for file in folder.rglob("*.py") if file.stat().st_size)


def test_a_package_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("mine")
    written = Path.write_text

    def full(self: Path, *args: str, **kwargs: str) -> int:
        if self.name == "stager_contract.py":
            raise OSError(28, "No space left on device")
        return written(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    for name, where, reason in (
        ("mine", "", "already exists; nothing was changed"),
        ("mine", "mine/precious.txt", "Choose another --dir"),
        ("other", "", "No space left on device"),
    ):
        assert reason in command("new", "stager", name, "--dir", tmp_path / where, code=2).err
    assert [file.name for file in tmp_path.rglob("*")] == ["mine", "precious.txt"]


def test_a_name_that_cannot_be_had_is_refused_with_the_reason(tmp_path: Path, command: Command) -> None:
    taken = "stagereg.stagers.overlapped:OverlappedStager of hydra-stagereg"
    reasons = {
        "is invalid: use at most 28 lower-case letters": ("9x", "a.b", "mine_", "Mine", "a" * 29),
        taken: ("overlapped",),
    }
    reasons |= {"cannot be both": ("null", "class", "join", "stager_contract"), "is already a Python module": ("json",)}
    for reason, names in reasons.items():
        for name in names:
            assert reason in command("new", "stager", name, "--dir", tmp_path, code=2).err
    assert list(tmp_path.iterdir()) == []


def test_the_next_commands_are_printed_and_work_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = command("new", "joinable", "mine", "--dir", "some where", "--json").json
    folder = tmp_path / seen["folder"]
    assert "pyproject.toml" in seen["files"]
    assert seen["files"] == sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    goes = run("sh", "-c", seen["next"][0].split(" && ")[0] + " && pwd", cwd=tmp_path)
    assert goes.stdout.strip() == str(tmp_path / "some where" / "mine")
    assert seen["next"][1:] == ["python -m pytest", "stagereg check mine"]
