"""``stagereg list``: all components and who provides them, and nothing is imported."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagereg import registry
from stagereg.commands.listing import _stdout_to_stderr

from .checkpoint_directories import save
from .conftest import GOOD, Command, Install


def test_every_component_is_listed_with_its_package(command: Command) -> None:
    found = command("list", "--json").json["components"]
    entries = {(e.kind, e.name): (e.target, e.distribution, e.version) for e in registry.entries()}
    assert {(e["kind"], e["name"]): (e["target"], e["distribution"], e["version"]) for e in found} == entries
    _, _, *rows = command("list").out.splitlines()
    for row, each in zip(rows, found, strict=True):
        package = f"{each['distribution']} {each['version']}".strip() or each["file"]
        assert row.split() == [each["kind"], each["name"], *package.split(), each["target"]]
    storages = command("list", "storage", "--json").json["components"]
    assert [each["name"] for each in storages] == registry.names("storage")
    wrong = command("list", "joinabel", code=2).err
    assert "Unknown kind of component: 'joinabel'. Did you mean 'joinable'?" in wrong


def test_components_are_listed_unimported_nonsense_is_named(install: Install, command: Command) -> None:
    for package in ("one", "two"):
        install(package, "raise SystemExit('imported')", {"stager.same": "Same", f"stager.of_{package}": "Same"})
    install("odd", "", {"stagr.x": "X", "stager.good": "Good"})
    seen = command("list", "--json").json
    found = {each["name"]: each for each in seen["components"]}
    assert {"same@one", "same@two", "of_one", "good"} < set(found)
    assert (found["of_one"]["distribution"], found["of_one"]["version"]) == ("one", "1.2")
    assert [each["distribution"] for each in seen["unreadable"]] == ["odd 1.2"]
    assert "stagr.x" in seen["unreadable"][0]["reason"]
    assert "Some components of odd 1.2 cannot be listed. Run `stagereg doctor` for the reasons." in command("list").out


def program(text: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-c", text, *map(str, arguments)], {**os.environ, **more}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)


def test_listing_and_help_import_nothing_heavy(tmp_path: Path) -> None:
    save(tmp_path, 100)
    text = """
import contextlib, sys
from stagereg import cli
codes = [cli.main(asked) for asked in (["list"], ["ls", sys.argv[1]], ["verify", sys.argv[1]])]
with contextlib.suppress(SystemExit):
    cli.main(["--help"])
heavy = [name for name in ("torch", "hydra", "omegaconf", "fsspec", "stagereg.stagers") if name in sys.modules]
sys.exit(f"exit codes {codes}, imported: {heavy}" if heavy or any(codes) else 0)
"""
    done = program(text, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error_and_no_traceback() -> None:
    text = """
import os, sys
from stagereg import cli
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(writing)
os.close(reading)
sys.exit(cli.main(["list"]))
"""
    done = program(text, PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_module_of_this_directory_can_be_named(tmp_path: Path) -> None:
    head = 'import stagereg\nprint("imported")\n@stagereg.register("stager", "mine_listed")'
    (tmp_path / "mine_listed.py").write_text(head + GOOD)

    def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "stagereg", *arguments, "--json"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    listed = asked("list", "stager", "--plugins", "mine_listed")
    assert "mine_listed" in {each["name"] for each in json.loads(listed.stdout)["components"]}
    shown = asked("show", "mine_listed", "--plugins", "mine_listed")
    assert json.loads(shown.stdout)["file"] == f"{tmp_path / 'mine_listed.py'}:3"
    missed = asked("list", "--plugins", "mine_lsted")
    assert (missed.returncode, missed.stdout) == (2, "")
    assert missed.stderr.startswith("stagereg: --plugins names the plugin 'mine_lsted', which cannot be imported. Did ")
    assert "mine_listed" in missed.stderr
    assert "opcode" not in asked("list", "--plugins", "nope").stderr, "no module of Python itself"


def test_other_output_of_python_c_or_a_child_is_not_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(KeyError), _stdout_to_stderr():
        print("python")
        os.write(1, b"c\n")
        subprocess.run([sys.executable, "-S", "-c", "print('child')"], check=True)
        raise KeyError  # what goes wrong meanwhile must not leave it there
    print("document")
    printed = capfd.readouterr()
    assert printed.out == "document\n"
    assert sorted(printed.err.split()) == ["c", "child", "python"]
