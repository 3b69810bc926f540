"""The command ``stagereg``: an error is one screen and an exit code, never a traceback."""

from __future__ import annotations

import pytest

import stagereg.commands.listing as listing
from stagereg import __version__, cli
from stagereg.errors import StageregError


def test_a_misspelt_command_is_an_error_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["shwo", "pinned_cached"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no command 'shwo'. Did you mean 'show'?" in printed.err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"stagereg {__version__}\n"


@pytest.mark.parametrize("command", ["list", "show", "new", "check", "doctor"])
def test_every_command_about_plugins_prints_json_if_asked(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert "--json" in capsys.readouterr().out


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
