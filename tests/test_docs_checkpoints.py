"""The page on checkpoints: its commands run and print what it shows, its tables are those of the code."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stagereg.checkpoint.failpoints import POINTS

from .pages import fits

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "checkpoints.md"
LIMIT_S = 120
COMMANDS = {"ls": "inventory", "verify": "inventory", "convert": "converting", "bench": "command"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def consoles() -> list[tuple[str, str]]:
    """The commands of the page, each with the output that the page shows."""
    parts = [part for text in blocks("console") for part in re.split(r"^\$ ", text, flags=re.M)[1:]]
    return [(line, shown) for line, _, shown in (part.partition("\n") for part in parts)]


def inline_commands() -> list[list[str]]:
    """The commands of stagereg in the text, as lists of arguments; a name without arguments is not a command."""
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.M | re.S)
    found = [shlex.split(code) for code in re.findall(r"`(stagereg [^`\n]+)`", text)]
    return [each[1:] for each in found if len(each) > 2]


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    _, _, rest = PAGE.read_text().partition(f"| {head} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_moments_is_that_of_the_code() -> None:
    points = [(name.strip("`"), what) for name, what, *_ in rows("point")]
    assert points == [(name, what.replace("``", "`")) for name, what in POINTS.items()]


def test_every_command_of_the_page_is_understood() -> None:
    parser = argparse.ArgumentParser()
    added = parser.add_subparsers(required=True)
    for module in set(COMMANDS.values()):
        package = "stagereg.bench" if module == "command" else "stagereg.commands"
        importlib.import_module(f"{package}.{module}").add_to(added)
    given = [shlex.split(line)[1:] for line, _ in consoles() if line.startswith("stagereg ")] + inline_commands()
    for arguments in given:
        parser.parse_args([argument for argument in arguments if argument != "..."])
    assert {arguments[0] for arguments in given} == set(COMMANDS)


def test_every_option_that_the_page_names_is_the_checkpointers() -> None:
    from stagereg.checkpoint.checkpointer import Checkpointer

    named = set(re.findall(r"`checkpoint\.(\w+)", PAGE.read_text()))
    assert {"verify", "on_error", "timeout", "grace", "resume", "dir"} <= named
    assert named <= set(inspect.signature(Checkpointer).parameters)


def test_the_links_of_the_page_have_targets() -> None:
    links = re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", PAGE.read_text())
    for link, anchor in links:
        target = PAGE.parent / link if link else PAGE
        assert target.exists(), link
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
    assert len(links) >= 5


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_command_of_the_page_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (program,) = (text for text in blocks("python") if text.startswith("# train.py"))
    (tmp_path / "train.py").write_text(program)
    bin = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PATH": bin}
    flipped = False
    for line, shown in consoles():
        ended = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        flipped = flipped or line.startswith("printf")
        assert ended.returncode == (flipped and line.startswith("stagereg verify")), f"$ {line}\n{ended.stdout}"
        printed = "".join(f"{each.rstrip()}\n" for each in ended.stdout.splitlines())
        assert fits(shown, printed), f"$ {line}\n{printed}\n-- the page shows\n{shown}"
