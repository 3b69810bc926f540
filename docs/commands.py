"""Writes the reference of the command line from its parsers: ``python docs/commands.py > docs/commands.md``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from stagereg.cli import BUILT_IN

__all__ = ["page"]

_HEAD = """\
# Command line

Every subcommand of `stagereg` with its arguments, written by `python docs/commands.py`: edit the help texts in the
source, not this page. A subcommand exits with code 0 after success and with code 2 after an invalid request. The
description names other exit codes. `python train.py` starts a training program: [from torchrun](from-torchrun.md).
"""


def page() -> str:
    """Return the page, in Markdown."""
    top = argparse.ArgumentParser("stagereg")
    commands = top.add_subparsers()
    for module in dict.fromkeys(BUILT_IN.values()):
        importlib.import_module(module).add_to(commands)
    shown = [line for name in BUILT_IN for line in _command(commands, commands.choices[name], "##")]
    return _HEAD + "\n".join(shown) + "\n"


def _command(parent: argparse._SubParsersAction, parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """Yield the lines of the section of a subcommand, then of its own subcommands."""
    helps = {action.dest: action.help for action in parent._choices_actions}
    text = parser.description or helps.get(parser.prog.split()[-1]) or ""
    yield f"\n{level} {parser.prog}\n\n{text[:1].upper()}{' '.join(text[1:].split()).removesuffix('.')}."
    rows = [row for action in parser._actions if (row := _row(parser, action))]
    if rows:
        yield "\n| argument | description |\n|---|---|"
        yield from rows
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _command(action, child, f"{level}#")


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the row of an argument, or an empty string for an argument that is not shown."""
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
        return ""
    value = action.metavar or ("/".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = "" if action.nargs == 0 else str(value)
    name = ", ".join(f"{flag} {value}".strip() for flag in action.option_strings) or value
    choices = ", ".join(map(str, action.choices or ()))
    text = " ".join(((action.help or "") % {**vars(action), "prog": parser.prog, "choices": choices}).split())
    return f"| `{name}` | {text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(page(), end="")
