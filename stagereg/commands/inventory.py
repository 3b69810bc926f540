"""``stagereg ls``: what checkpoints there are, when each was saved, how large it is, and who writes there now.

Reads manifests and sizes, no content; so is the state of a checkpoint (``stagereg verify`` reads the content).
Also while a run writes there, which is not disturbed.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import stagereg.output as output

if TYPE_CHECKING:
    from stagereg.checkpoint.damage import Condition
    from stagereg.commands.located import Located

__all__ = ["add_to", "run"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``ls`` to the commands of ``stagereg``."""
    help_ = "list the checkpoints of a directory, and who writes there"
    parser = commands.add_parser("ls", help=help_, description=help_[0].upper() + help_[1:] + ".")
    parser.add_argument("directory", help="of checkpoints (checkpoint.dir), or one checkpoint; a path or a URL")
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print the checkpoints. Returns 0, also where some are damaged.

    Raises:
        CheckpointError: there is no checkpoint, and nothing of one.
        ConfigError: the URL is of a kind that cannot be read here.
    """
    from stagereg.commands.located import located, readable

    found = located(asked.directory, empty=True)
    owner = found.store.holder()
    entries = [_entry(each, found) for each in found.conditions]
    if not found.one:
        entries += [_leftover(path, owner is not None) for path in found.store.leftovers()]
    if asked.json:
        held = None if owner is None else dataclasses.asdict(owner)
        output.as_json({"root": found.store.root, "held_by": held, "checkpoints": entries})
        return 0
    rows = [
        (
            _cell(each["step"]),
            "-" if each["time"] is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"])),
            readable(each["bytes"]),
            _cell(each["ranks"]),
            _cell(each["storage"]),
            each["state"],
            "latest" if each["latest"] else each["why"],
        )
        for each in entries
    ]
    output.table(found.store.root, ("step", "saved", "size", "ranks", "storage", "state", ""), rows, verdict="state")
    if owner is not None:
        output.echo(f"\nHeld by {owner}")
    return 0


def _entry(each: Condition, found: Located) -> dict[str, Any]:
    from stagereg.commands.located import size, state

    manifest = each.manifest
    return {
        "path": each.path,
        "step": each.step,
        "time": None if manifest is None else manifest.time,
        "bytes": size(each),
        "ranks": None if manifest is None else manifest.world_size,
        "storage": None if manifest is None else manifest.storage,
        "latest": each.path == found.latest,
        "state": state(each, "complete"),
        "why": str(each),
    }


def _leftover(path: str, held: bool) -> dict[str, Any]:
    from stagereg.checkpoint.manifest import step_within

    return {
        "path": path,
        "step": step_within(path.rpartition("/")[2]),
        "time": None,
        "bytes": None,
        "ranks": None,
        "storage": None,
        "latest": False,
        "state": "being written" if held else "leftover of a dead run",
        "why": "",
    }


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
