"""The command ``stagereg``: an error is one screen and an exit code, never a traceback."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import stagereg.commands.listing as listing
from stagereg import __version__, cli
from stagereg.errors import StageregError


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["shwo", "pinned_cached"], 2, "", "unknown command 'shwo'. Did you mean 'show'?"),
        (["--version"], 0, f"stagereg {__version__}\n", ""),
        *(([command, "--help"], 0, "--json", "") for command in ("list", "show", "new", "check", "doctor")),
    ],
)
def test_misspelt_commands_and_help(
    arguments: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=str(code)):
        cli.main(arguments)
    printed = capsys.readouterr()
    assert out in printed.out
    assert err in printed.err
    assert bool(printed.out) is not bool(printed.err)


@pytest.mark.parametrize(("raised", "code"), [(StageregError("reason"), 2), (KeyboardInterrupt(), 130)])
def test_errors_and_interruptions_are_exit_codes(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(listing.registry, "entries", fail)
    assert cli.main(["list"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == ("stagereg: reason\n" if code == 2 else "")


def test_without_a_command_it_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(name in shown.err for name in ("list", "show", "new", "check", "doctor", "bench"))


def test_each_command_is_added_by_the_module_that_is_named_for_it() -> None:
    for name, module in cli.BUILT_IN.items():
        added = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(module).add_to(added)
        assert name in added.choices
        assert {each for each in cli.BUILT_IN if cli.BUILT_IN[each] == module} == {*added.choices}


COMMAND = """
def add_to(commands):
    commands.add_parser("greet", help="say hello").set_defaults(run=lambda asked: print("hello") or 7)
"""


def write_package(folder: Path, name: str, source: str, command: str) -> None:
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[stagereg.commands]\n{command} = {name}\n")


def test_another_package_adds_a_command_and_a_broken_one_costs_its_own_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_package(tmp_path, "greeting", COMMAND, "greet")
    write_package(tmp_path, "breaking", "raise ValueError('bad luck')", "broken")
    write_package(tmp_path, "leaving", "raise SystemExit(0)", "left")
    write_package(tmp_path, "imitating", COMMAND, "list")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["greet"]) == 7
    assert capsys.readouterr().out == "hello\n"
    assert cli.main(["broken"]) == 2
    told = "`stagereg broken` cannot run: it could not be imported from breaking (ValueError: bad luck). Reinstall its"
    assert told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert "say hello" in shown
    assert "not available: `stagereg broken` cannot run" in " ".join(shown.split())
    assert "not available: `stagereg left` cannot run" in " ".join(shown.split())
    assert cli.main(["left"]) == 2
    assert cli.main(["list", "stager"]) == 0  # a name of the project's own is not taken away
    assert "overlapped" in capsys.readouterr().out


def test_a_command_whose_part_of_the_installation_is_missing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.BUILT_IN, "bench", "stagereg.gone.command")
    assert cli.main(["bench"]) == 2
    why = "the module stagereg.gone is missing in this installation"
    told = f"stagereg: `stagereg bench` cannot run: {why}. Reinstall stagereg.\n"
    assert capsys.readouterr().err == told


def test_a_command_imports_no_other_command() -> None:
    program = "import sys; from stagereg import cli; cli.main(['list']); print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = {each for each in done.stderr.split() if each.startswith(("stagereg.commands.", "stagereg.bench"))}
    assert loaded == {"stagereg.commands.listing", "stagereg.commands.arguments"}
    assert not {"torch", "hydra"} & {*done.stderr.split()}
