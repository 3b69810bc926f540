"""``stagereg verify``: whether checkpoints are what was written, file by file. Reads, changes nothing, loads nothing.

The exit code is 0 if all are good, 1 if something is wrong with one, 2 if there is nothing to look at; so a shell can
ask before it resumes, copies or deletes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import stagereg.output as output
from stagereg.errors import CheckpointError

if TYPE_CHECKING:
    from stagereg.checkpoint.damage import Condition
    from stagereg.commands.located import Located

__all__ = ["add_to", "run"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``verify`` to the commands of ``stagereg``."""
    help_ = "check whether checkpoints are what was written"
    parser = commands.add_parser("verify", help=help_, description=help_[0].upper() + help_[1:] + ".")
    parser.add_argument("directory", help="of checkpoints (checkpoint.dir), or one checkpoint; a path or a URL")
    parser.add_argument("--fast", action="store_true", help="manifests and sizes only; the content is not read")
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print what is wrong. Returns 0 if nothing is, else 1.

    Raises:
        CheckpointError: there is no checkpoint, or a run has deleted all of them while they were read.
        ConfigError: the URL is of a kind that cannot be read here.
    """
    from stagereg.commands.located import located

    found = located(asked.directory)
    looked: list[Condition] = []
    for each in found.conditions:
        output.progress(f"reading {each.path}")
        looked.append(each if asked.fast else found.store.examine(each.path))
    output.progress()
    looked = _there(found, looked)
    bad = [each for each in looked if each.damages]
    good = next((each for each in _newest_first(looked) if not each.damages), None)
    if asked.json:
        output.as_json(
            {
                "root": found.store.root,
                "verify": "fast" if asked.fast else "full",
                "checkpoints": [_plain(each) for each in looked],
                "newest_good": None if good is None else good.path,
            }
        )
    else:
        _show(found, looked, bad, good, asked.fast)
    return 1 if bad else 0


def _there(found: Located, looked: list[Condition]) -> list[Condition]:
    """Return those that were not deleted while they were read, by a run that goes on and keeps only the newest."""
    if not any(each.damages for each in looked):
        return looked
    from stagereg.checkpoint.manifest import step_of

    complete, refused = found.store.checkpoints()
    there = {path.rpartition("/")[2] for path in refused} | {one.name for one in complete}
    left = [each for each in looked if not each.damages or each.name in there or step_of(each.name) is None]
    if not left:
        raise CheckpointError(
            f"While the checkpoints in {found.store.root} were read, a run replaced all of them by newer ones. Look "
            "again, or with --fast."
        )
    return left


def _newest_first(conditions: Sequence[Condition]) -> list[Condition]:
    return sorted(conditions, key=lambda each: -1 if each.manifest is None else each.manifest.serial, reverse=True)


def _plain(each: Condition) -> dict[str, object]:
    from stagereg.commands.located import size, state

    return {
        "path": each.path,
        "step": each.step,
        "files": None if each.manifest is None else len(each.manifest.files),
        "bytes": size(each),
        "state": state(each, "ok"),
        "damages": [{"file": damage.file, "what": damage.what} for damage in each.damages],
    }


def _show(
    found: Located, looked: Sequence[Condition], bad: Sequence[Condition], good: Condition | None, fast: bool
) -> None:
    from stagereg.commands.located import readable, size, state

    rows = []
    for each in looked:
        files = "-" if each.manifest is None else str(len(each.manifest.files))
        step = "-" if each.step is None else str(each.step)
        damages = "\n".join(map(str, each.damages))
        rows.append((step, files, readable(size(each)), state(each, "ok"), damages))
    output.table(found.store.root, ("step", "files", "size", "state", "what is wrong"), rows, verdict="state")
    output.echo()
    how = "By manifests and sizes, no content was read:" if fast else "The content of every file was read:"
    count = f"{len(looked)} checkpoint{'' if len(looked) == 1 else 's'}"
    if not bad:
        output.echo(f"{how} {count}, {'it is' if len(looked) == 1 else 'all'} good.")
        return
    output.echo(f"{how} {count}, {len(bad)} not good.", "bold red")
    if not found.one:
        text = "None is good." if good is None else f"The newest good one is {good.path}"
        output.echo(text)
