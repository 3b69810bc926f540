"""``stagereg list``: all components and who provides them, and nothing is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagereg import cli, registry

from .conftest import Install


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    assert cli.main(["list", "--json", *arguments]) == 0
    components: list[dict[str, str]] = json.loads(capsys.readouterr().out)["components"]
    return components


def test_every_component_is_listed_with_its_package(capsys: pytest.CaptureFixture[str]) -> None:
    found = {(each["kind"], each["name"]): each for each in listed(capsys)}
    assert set(found) == {(kind, name) for kind in registry.kinds() for name in registry.names(kind)}
    for (kind, name), each in found.items():
        entry = registry.find(kind, name)
        assert (each["target"], each["distribution"], each["version"]) == (
            entry.target,
            entry.distribution,
            entry.version,
        )


def test_the_table_has_the_content_of_the_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert cli.main(["list"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    packages = [f"{each['distribution']} {each['version']}".strip() or each["file"] for each in found]
    assert [row.split() for row in rows] == [
        [each["kind"], each["name"], *package.split(), each["target"]]
        for each, package in zip(found, packages, strict=True)
    ]


def test_only_one_kind_is_listed_when_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert [each["name"] for each in listed(capsys, "storage")] == registry.names("storage")


def test_a_misspelt_kind_is_reported_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "joinabel"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "No kind 'joinabel' of component. Did you mean 'joinable'?" in seen.err


def test_a_component_of_a_package_is_listed_though_importing_it_would_fail(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("theirs", "raise SystemExit('imported')", {"stager.theirs": "Theirs"})
    [found] = [each for each in listed(capsys) if each["name"] == "theirs"]
    assert (found["kind"], found["distribution"], found["version"]) == ("stager", "theirs", "1.2")
    assert "theirs" not in sys.modules


def test_two_packages_with_one_name_are_both_listed_by_their_qualified_names(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("one", "two"):
        install(package, "raise SystemExit('imported')", {"stager.same": "Same"})
    assert {"same@one", "same@two"} < {each["name"] for each in listed(capsys, "stager")}


def test_a_package_that_announces_nonsense_is_reported_and_costs_no_other(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("odd", "", {"stagr.x": "X", "stager.good": "Good"})
    assert cli.main(["list"]) == 0
    seen = capsys.readouterr().out
    assert "good" in seen
    assert "Not all can be listed of: odd 1.2. See `stagereg doctor`." in seen
    cli.main(["list", "--json"])
    [unreadable] = json.loads(capsys.readouterr().out)["unreadable"]
    assert unreadable["distribution"] == "odd 1.2"
    assert "stagr.x" in unreadable["reason"]


def test_listing_and_help_import_neither_torch_nor_hydra_nor_a_component() -> None:
    program = """
import contextlib, sys
from stagereg import cli
cli.main(["list"])
cli.main(["list", "--json"])
with contextlib.suppress(SystemExit):
    cli.main(["--help"])
heavy = [name for name in ("torch", "hydra", "omegaconf", "stagereg.stagers") if name in sys.modules]
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error_and_no_traceback() -> None:
    program = """
import os, sys
from stagereg import cli
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(writing)
os.close(reading)
sys.exit(cli.main(["list"]))
"""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_module_of_this_directory_is_listed_and_shown_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine_listed.py").write_text("""
import stagereg
print("imported")

@stagereg.register("stager", "mine_listed")
class Mine:
    should_synchronize_after_execute = True
    def __init__(self, slots: int = 2) -> None: ...
    def stage(self, state_dict): ...
    def synchronize_staging(self) -> None: ...
    def close(self) -> None: ...
""")

    def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "stagereg", *arguments, "--json"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    listed = asked("list", "stager", "--plugins", "mine_listed")
    assert "mine_listed" in {each["name"] for each in json.loads(listed.stdout)["components"]}
    shown = asked("show", "mine_listed", "--plugins", "mine_listed")
    assert json.loads(shown.stdout)["file"] == f"{tmp_path / 'mine_listed.py'}:5"
    missed = asked("list", "--plugins", "mine_lsted")
    assert (missed.returncode, missed.stdout) == (2, "")
    assert "mine_listed" in missed.stderr
