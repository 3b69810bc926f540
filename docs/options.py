"""Writes the option reference from the registry: ``python docs/options.py > docs/options.md``.

It has every component of stagereg itself, whatever else is installed, and imports all of them.
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
    "stager": "Stagers: how a state dict is copied",
    "storage": "Storages: how a checkpoint is written",
    "checkpoint": "The checkpointer",
    "tier": "Tiers: copies nearer than the store",
    "on_commit": "What is called after a checkpoint",
    "join": "The join",
    "joinable": "Joinables: what a join joins",
    "join_hook": "Join hooks: what a joined rank does in place of a step",
}
"""What each kind is called, in the order of the page."""
_HEAD = """\
# Options

Everything that can be chosen and set, written by `python docs/options.py`: edit docstrings,
not this page. An option is set where its component is chosen, `python train.py stager=pinned_cached
stager.max_in_flight=3`; `null` is `None`. What the program passes is no option: it goes to `stagereg.instantiate`.
`stagereg show KIND/NAME` shows the same of the plugins of other packages.
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
    """Options of the run itself, as the config that programs begin with has them, and its comments on them."""
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
    # The name alone, also where another package of this machine announces it, too.
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
