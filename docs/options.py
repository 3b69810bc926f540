"""Writes the option reference from the registry: ``python docs/options.py > docs/options.md``.

The page lists all components of stagereg itself, not those of other installed packages. The script imports them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import stagereg.registry as registry
from stagereg.base.installed import DISTRIBUTION
from stagereg.commands.describe import Field, describe
from stagereg.registry import Entry

__all__ = ["page"]

_KINDS = {
    "stager": "Stagers: copy a state dict",
    "storage": "Storages: write a checkpoint",
    "checkpoint": "The checkpointer",
    "tier": "Tiers: local copies of checkpoints",
    "on_commit": "Callbacks after a checkpoint",
    "join": "The join",
    "joinable": "Joinables: objects that take part in a join",
    "join_hook": "Join hooks: the work of a joined rank in each step",
}
"""Headings by kind, in the order of the page."""
_HEAD = """\
# Options

All components and their options, written by `python docs/options.py`: edit docstrings, not this page.
Set an option where its component is selected: `python train.py stager=pinned_cached stager.max_in_flight=3`;
`null` is `None`. Arguments that the program passes to `stagereg.instantiate` are not options.
`stagereg show KIND/NAME` also shows the options of plugins from other packages.
"""


def page() -> str:
    """Return the page, in Markdown."""
    own = [entry for entry in registry.entries() if entry.distribution == DISTRIBUTION]
    parts = [_HEAD, "\n## The run\n\n", "\n".join(_of_run()) + "\n"]
    for kind in (*_KINDS, *sorted({entry.kind for entry in own} - set(_KINDS))):
        parts.append(f"\n## {_KINDS.get(kind, kind)}\n")
        parts += ["\n".join(_component(entry)) + "\n" for entry in own if entry.kind == kind]
    return "".join(parts)


def _of_run() -> Iterator[str]:
    """Yield the table of the options of the run itself, from the default config and its comments."""
    comment, rows = [], []
    for line in Path(__file__).parents[1].joinpath("conf", "stagereg.yaml").read_text().splitlines():
        key, colon, default = line.partition(": ")
        if line.startswith("#"):
            comment.append(line.removeprefix("# "))
        elif colon and key.isidentifier():
            rows.append((_code(key), _code(default), _cell(" ".join(comment))))
        if not line.startswith("#"):
            comment = []
    return _table(("option", "default", "description"), rows)


def _component(entry: Entry) -> Iterator[str]:
    described = describe(entry)
    # The plain name, even if another package on this machine registers the same name.
    yield f"\n### {entry.kind}/{entry.bare}\n"
    yield f"{described.summary} (`{entry.target}`)"
    if described.options:
        yield ""
        yield from _table(
            ("option", "type", "default", "description"),
            [(_code(o.name), _code(o.type), _default(o), _cell(o.help)) for o in described.options],
        )
    if described.runtime:
        yield ""
        yield from _table(
            ("passed by the program", "type", "", "description"),
            [(_code(r.name), _code(r.type), "required" * r.required, _cell(r.help)) for r in described.runtime],
        )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _default(option: Field) -> str:
    return "*required*" if option.required else _code(option.default)


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
