"""What the commands print: aligned columns in a pipe, colours on a terminal, one JSON document for programs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.base import output
from stagereg.errors import ConfigError, StagingError, reason

TOKENS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
SENTENCES = st.lists(TOKENS, min_size=1, max_size=60).map(" ".join)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_columns_are_aligned_and_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "kept", "x"), ("longer", "broken", "[red]y[/red]")]
    output.table("Title", ("name", "verdict", "seen"), rows, verdict="verdict")
    title, head, rule, *body = printed(capsys)
    assert title == "Title"
    assert "\x1b" not in "".join(body)
    assert [line[head.index("verdict") :].split()[0] for line in body] == ["kept", "broken"]
    assert [line[head.index("seen") :] for line in body] == ["x", "[red]y[/red]"]
    assert set(rule) == {" ", "-"}


@settings(deadline=None)
@given(rows=st.lists(st.tuples(TOKENS, TOKENS, SENTENCES), min_size=1, max_size=5))
def test_no_text_is_lost_and_no_line_is_wider_than_it_has_to_be(rows: list[tuple[str, str, str]]) -> None:
    into = io.StringIO()
    with contextlib.redirect_stdout(into):
        output.table("", (), rows)
    lines = into.getvalue().splitlines()
    assert " ".join(lines).split() == " ".join(" ".join(row) for row in rows).split()
    assert max(map(len, lines)) <= 120


def test_a_cell_of_several_lines_stays_in_its_column(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("", (), [("name", "one\n  two"), ("other", "three")])
    output.table("Nothing", (), [])
    assert printed(capsys) == ["  name   one", "           two", "  other  three", "Nothing"]


def test_on_a_terminal_a_verdict_has_a_colour(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("broken", "broken", "part " * 60), ("kept", "kept", "")]
    with contextlib.redirect_stdout(terminal):
        output.table("T", ("name", "verdict", "seen"), rows, verdict="verdict")
        output.echo("text", "bold")
    printed = terminal.getvalue()
    assert printed.count("\x1b[1;31mbroken") == printed.count("\x1b[32mkept") == 1, "a name is no verdict"
    assert printed.endswith("\x1b[1mtext\x1b[0m\n")
    assert 60 < max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in printed.splitlines()) <= 80
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.redirect_stdout(Terminal()) as plain:
        output.echo("text", "bold")
    assert plain.getvalue() == "text\n"


COMMANDS = "\x1b]0;owned\x07\x9b1m\r\x7f\u202e\u2028\udcff"


def test_commands_for_a_terminal_are_shown_and_not_obeyed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.redirect_stdout(terminal):
        output.echo(COMMANDS, "bold")
        output.table(f"{COMMANDS}\nforged", (COMMANDS, "b"), [(COMMANDS, f"{COMMANDS}é漢🙂")])
        output.warn(COMMANDS)
        output.progress(f"{COMMANDS}\n")
        output.as_json({COMMANDS: COMMANDS})
        print(StagingError([COMMANDS], COMMANDS), ConfigError(COMMANDS), reason(ValueError(COMMANDS)))
    printed = terminal.getvalue()
    own = re.sub(r"\x1b\[[\d;]*[mK]|\r\x1b\[K", "", printed)
    assert "\x1b[1m" in printed
    assert not [char for char in own if not char.isprintable() and char != "\n"]
    assert own.count(r"\x1b]0;owned\x07\x9b1m\r\x7f\u202e\u2028\udcff") == 11
    assert "é漢🙂" in own
    assert r"\udcff\nforged" in own, "a title is one line"


def test_json_is_one_document_that_any_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    output.as_json({"path": os.curdir, "set": {1}, "text": "ü"})
    assert json.loads(capsys.readouterr().out) == {"path": ".", "set": "{1}", "text": "ü"}
    output.as_json({"numbers": (1.5, math.nan, [-math.inf])})
    assert json.loads(capsys.readouterr().out) == {"numbers": [1.5, "nan", ["-inf"]]}


def test_progress_is_shown_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.progress("long")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", made := Terminal())
    output.progress("long")
    output.progress()
    assert made.getvalue() == "\r\x1b[Klong\r\x1b[K"


def test_a_warning_is_one_write_so_that_the_lines_of_ranks_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raw(io.RawIOBase):
        writes: ClassVar[list[bytes]] = []

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.writes.append(bytes(data))
            return len(data)

    # The stderr of an interpreter with PYTHONUNBUFFERED=1.
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Raw(), write_through=True))  # type: ignore[type-var]
    output.warn("two\nlines")
    assert [each for each in Raw.writes if each] == [b"two\nlines\n"]
