"""The pages of the documentation: their blocks, their commands, and whether these print what the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stagereg.testing import Contract

DOCS = Path(__file__).parents[2] / "docs"


class Command(NamedTuple):
    """A line after ``$`` and the output that the page shows."""

    line: str
    shown: str

    def check(self, printed: str) -> None:
        """Fail unless this is what the command printed."""
        assert fits(self.shown, printed), f"$ {self.line}\n{printed}\n-- the page shows\n{self.shown}"


class Page:
    """A page of ``docs``.

    Args:
        name: of its file.
    """

    def __init__(self, name: str) -> None:
        self.path = DOCS / name
        self.text = self.path.read_text()
        self.blocks: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", self.text, re.M | re.S)
        """Language and text of each, in order."""

    def of(self, language: str) -> list[str]:
        return [text for each, text in self.blocks if each == language]

    def consoles(self) -> list[Command]:
        return [command for text in self.of("console") for command in commands(text)]

    def started(self, program: str) -> list[list[str]]:
        """The arguments of each command that starts ``program``, also of those in the text and in tables."""
        scripts = [line for text in self.of("bash") for line in text.replace("\\\n", " ").splitlines()]
        inline: list[str] = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", self.text, flags=re.M | re.S))
        lines = [command.line for command in self.consoles()] + scripts + inline
        split = [shlex.split(line.rstrip("& "), comments=True) for line in lines if program in line]
        found = [words[words.index(program) + 1 :] for words in split if program in words]
        return [[argument for argument in arguments if argument != "..."] for arguments in found]


def commands(text: str) -> list[Command]:
    """The commands of a block."""
    parts = [part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.M)[1:]]
    return [Command(line, shown) for line, _, shown in parts]


def fits(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what a page shows, line by line; ``...`` stands for anything, and so does each number."""
    lines = ["(?:.*\n)*" if line == "..." else f"{_pattern(line)}\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def _pattern(line: str) -> str:
    number = r"\d+(?:[.,]\d+)*"
    parts = [re.escape(re.sub(number, "\0", part)) for part in line.split()]
    return r"\s*" + r"\s+".join(part.replace(re.escape("..."), ".*").replace("\0", number) for part in parts)


def expect_table_of_contracts(name: str, kinds: Mapping[str, type[Contract]]) -> None:
    """Try contracts; the page has a table of that name: "yes", "**no**", or "-" where a promise could not be tried."""
    promises = {name: text for kind in kinds.values() for name, text in kind.promises().items()}
    rows = [["promise", *kinds], ["---"] * (len(kinds) + 1)]
    for promise, text in promises.items():
        kept = [kind.outcome(promise).kept for kind in kinds.values()]
        rows.append([text.rstrip("."), *({None: "-", True: "yes", False: "**no**"}[each] for each in kept)])
    shown = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- -->", Page("contracts-torch.md").text, re.S)
    assert shown
    assert shown[1].splitlines() == [f"| {' | '.join(row)} |" for row in rows]
