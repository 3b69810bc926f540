"""``stagereg convert``: a checkpoint as one file, a ``.pt`` for ``torch.load`` or a ``.safetensors``.

What is converted is checked first, as ``stagereg verify`` does it; of a directory of checkpoints it is the newest one
that is good. The checkpoint is read, never changed. :mod:`stagereg.checkpoint.export` describes such a file. Of a
directory that plain torch has written (``torch.distributed.checkpoint.save``), a ``.pt`` is made.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import stagereg.output as output
from stagereg.checkpoint.located import newest
from stagereg.commands.listing import add_plugins_option, import_plugins
from stagereg.errors import CheckpointError, ConfigError

__all__ = ["add_to", "run"]

_SHOWN = 8


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``convert`` to the commands of ``stagereg``."""
    help_ = "make one file of a checkpoint, for torch.load or for safetensors"
    more = (
        "It does not matter how many ranks saved it. A .pt has all of the state and is made in memory; a .safetensors "
        "has the tensors, and is made piece by piece."
    )
    parser = output.add_command(commands, "convert", help_, run, more)
    parser.add_argument("checkpoint", help="one checkpoint, or a directory of them (its newest good one); path or URL")
    parser.add_argument("out", help="the file: OUT.pt, OUT.pth or OUT.safetensors")
    parser.add_argument("--only", metavar="NAME", help="only this name of the state, such as model, as it is by itself")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    add_plugins_option(parser)


def run(asked: argparse.Namespace) -> int:
    """Write the file and print what is in it. Returns 0.

    Raises:
        CheckpointError: there is no good checkpoint, it has no such name, or the file cannot be written.
        ConfigError: OUT is no name of such a file, or ``--plugins`` names what cannot be imported.
    """
    from stagereg.checkpoint.export import SUFFIXES, export
    from stagereg.checkpoint.opened import open_files
    from stagereg.checkpoint.plain_dcp import is_plain_dcp, open_plain_dcp

    out = Path(asked.out).expanduser().absolute()
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out.name} has no known suffix; use one of {', '.join(SUFFIXES)}")
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"{out} cannot be a file: it is a directory, or there is none to write it to.")
    if not asked.force and os.path.lexists(out):
        raise ConfigError(f"{out} is there already; --force replaces it.")
    import_plugins(asked)
    step = None
    if is_plain_dcp(asked.checkpoint):
        if out.suffix == ".safetensors":
            raise ConfigError(f"{asked.checkpoint} is a directory of plain torch, of which only a .pt is made.")
        path, which = asked.checkpoint, f"{asked.checkpoint} of plain torch"
        files, parts = open_plain_dcp(path)
    else:
        output.progress(f"reading {asked.checkpoint}")
        try:
            chosen, passed = newest(asked.checkpoint, verify=True)
        finally:
            output.progress()
        for each in passed:
            print(f"Passing over {each.path}: {each}", file=sys.stderr)
        path, step = chosen.path, chosen.manifest.step
        which = f"step {step} of {path}"
        files, parts = open_files(chosen)
    output.progress(f"writing {out}")
    try:
        with files:
            names, left_out = export(files, parts, asked.only, out, asked.force, step)
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error}") from error
    finally:
        output.progress()
    nbytes = out.stat().st_size
    if asked.json:
        found = {"checkpoint": path, "step": step, "file": str(out), "bytes": nbytes}
        output.as_json(found | {"names": names, "left_out": left_out})
        return 0
    output.echo(f"{out}: {which}, {nbytes:,} bytes")
    output.echo(f"In it: {', '.join(map(_shown, names)) or 'nothing'}")
    if left_out:
        more = f", and {len(left_out) - _SHOWN} more (--json names all)" if len(left_out) > _SHOWN else ""
        output.echo(f"Not in it, being no tensors: {', '.join(map(_shown, left_out[:_SHOWN]))}{more}")
    return 0


def _shown(name: str) -> str:
    """A name as the checkpoint has it, without what a terminal would take for a command."""
    return name if name.isprintable() else ascii(name)
