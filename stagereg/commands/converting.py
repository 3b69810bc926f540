"""``stagereg convert``: a checkpoint as one file, a ``.pt`` for ``torch.load`` or a ``.safetensors``, or as several.

The command verifies the checkpoint first, of a directory the newest good one, and never changes it. A directory of
plain ``torch.distributed.checkpoint.save`` is converted too, without checksums. See
:mod:`stagereg.extensions.interop.export`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import stagereg.base.output as output
from stagereg.base.sizes import ByteSize
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.commands.arguments import add_command
from stagereg.commands.listing import add_plugins_option, import_plugins
from stagereg.errors import CheckpointError, ConfigError, listed

_DTYPES = ("float32", "bfloat16", "float16")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "make one file of a checkpoint, for torch.load or for safetensors"
    more = (
        "It does not matter how many ranks saved it. A .pt has all of the state and is made in memory; a .safetensors "
        "has the tensors, and is made piece by piece. --dtype and --max-shard-size are for a .safetensors."
    )
    parser = add_command(commands, "convert", help_, run, more)
    parser.add_argument("checkpoint", help="one checkpoint, or a directory of them (its newest good one); path or URL")
    parser.add_argument("out", help="the file: OUT.pt, OUT.pth or OUT.safetensors")
    parser.add_argument("--only", metavar="NAME", help="only this name of the state, such as model, as it is by itself")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--dtype", choices=_DTYPES, help="of all floating-point tensors of 16 bits or more")
    help_ = "several files OUT-00001-of-0000N.safetensors of at most this size, such as 5GB, and an index of them"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=help_)
    add_plugins_option(parser)


def run(asked: argparse.Namespace) -> int:
    """Write the file and print what is in it; return 0."""
    from stagereg.checkpoint.format.index import DTYPES
    from stagereg.extensions.interop.export import SAFETENSORS, SUFFIXES, TensorOptions, export
    from stagereg.extensions.interop.opening import first_good

    out = Path(asked.out).expanduser().absolute()
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out.name} has no known suffix; use one of {', '.join(SUFFIXES)}")
    if out.is_dir() or not out.parent.is_dir():
        why = "it is a directory" if out.is_dir() else f"there is no directory {out.parent}"
        raise ConfigError(f"{out} cannot be written: {why}.")
    if not asked.force and os.path.lexists(out):
        raise ConfigError(f"{out} is there already; --force replaces it.")
    if out.suffix != SAFETENSORS and (asked.dtype or asked.max_shard_size):
        raise ConfigError("--dtype and --max-shard-size are for a file called OUT.safetensors.")
    size = None if asked.max_shard_size is None else ByteSize(asked.max_shard_size)
    if size == 0:
        raise ConfigError("--max-shard-size is a size above 0, such as 5GB.")
    options = TensorOptions(asked.dtype and DTYPES[asked.dtype], size)
    import_plugins(asked)
    output.progress(f"reading {asked.checkpoint}")
    try:
        with first_good(asked.checkpoint, True, _show_passed) as checkpoint:
            output.progress(f"writing {out}")
            names, left_out, written = export(checkpoint, asked.only, out, asked.force, options)
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error}") from error
    finally:
        output.progress()
    path, step = checkpoint.path, checkpoint.step
    which = f"{path} of plain torch" if step is None else f"step {step} of {path}"
    nbytes = sum(each.stat().st_size for each in written)
    if asked.json:
        found = {"checkpoint": path, "step": step, "file": str(written[-1]), "bytes": nbytes}
        output.as_json(found | {"files": [str(each) for each in written], "names": names, "left_out": left_out})
        return 0
    more = f" and {len(written) - 1} files beside it" if len(written) > 1 else ""
    output.echo(f"{written[-1]}{more}: {which}, {nbytes:,} bytes")
    output.echo(f"In it: {listed(names)}")
    if left_out:
        output.echo(f"Not in it, being no tensors: {listed(left_out)}")
    return 0


def _show_passed(each: VerificationResult) -> None:
    output.progress()
    output.warn(f"Passing over {each.path}: {each}")
