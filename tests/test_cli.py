"""The command ``stagereg``: an error is one screen and an exit code, never a traceback."""

from __future__ import annotations

import pytest

import stagereg.commands.listing as listing
from stagereg import __version__, cli
from stagereg.errors import StageregError


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["shwo", "pinned_cached"], 2, "", "no command 'shwo'. Did you mean 'show'?"),
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
