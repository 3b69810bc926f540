"""``stagereg convert``: converts a checkpoint to a ``.pt`` file for ``torch.load``, or to ``.safetensors`` files.

The command verifies the checkpoint first, and never changes it. In a checkpoint directory, it converts the newest valid
checkpoint. It also converts checkpoints that ``torch.distributed.checkpoint.save`` wrote, which have no checksums.
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
    help_ = "convert a checkpoint to one file, for torch.load or for safetensors"
    more = (
        "The checkpoint may be saved by any number of ranks. A .pt file contains the whole state and is built in host "
        "memory. A .safetensors file contains only the tensors and is written in slices."
    )
    parser = add_command(commands, "convert", help_, run, more)
    help_ = "path or URL of a checkpoint, or of a checkpoint directory, whose newest valid checkpoint is converted"
    parser.add_argument("checkpoint", help=help_)
    parser.add_argument("out", help="the file to write: OUT.pt, OUT.pth or OUT.safetensors")
    parser.add_argument("--only", metavar="NAME", help="write only this top-level entry of the state, such as model")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    help_ = "convert floating-point tensors of 16 bits or more to this dtype; .safetensors only"
    parser.add_argument("--dtype", choices=_DTYPES, help=help_)
    help_ = "write files OUT-00001-of-0000N.safetensors of at most SIZE, such as 5GB, and their index"
    parser.add_argument("--max-shard-size", metavar="SIZE", help=help_)
    add_plugins_option(parser)


def run(asked: argparse.Namespace) -> int:
    """Write the file and print the names of its entries. Return 0."""
    from stagereg.checkpoint.format.index import DTYPES
    from stagereg.extensions.interop.export import SAFETENSORS, SUFFIXES, TensorOptions, export
    from stagereg.extensions.interop.opening import open_newest

    out = Path(asked.out).expanduser().absolute()
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"unknown suffix: {out.name}. Use one of {', '.join(SUFFIXES)}.")
    if out.is_dir() or not out.parent.is_dir():
        why = "the path is a directory" if out.is_dir() else f"the directory {out.parent} does not exist"
        raise ConfigError(f"cannot write {out}: {why}.")
    if not asked.force and os.path.lexists(out):
        raise ConfigError(f"{out} already exists. Pass --force to replace it.")
    if out.suffix != SAFETENSORS and (asked.dtype or asked.max_shard_size):
        raise ConfigError("--dtype and --max-shard-size require an output file OUT.safetensors.")
    size = None if asked.max_shard_size is None else ByteSize(asked.max_shard_size)
    if size == 0:
        raise ConfigError("--max-shard-size must be above 0, for example 5GB.")
    options = TensorOptions(asked.dtype and DTYPES[asked.dtype], size)
    import_plugins(asked)
    output.progress(f"reading {asked.checkpoint}")
    try:
        with open_newest(asked.checkpoint, True, _show_passed) as checkpoint:
            output.progress(f"writing {out}")
            names, left_out, written = export(checkpoint, asked.only, out, asked.force, options)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    finally:
        output.progress()
    path, step = checkpoint.path, checkpoint.step
    which = f"{path}, saved by plain torch" if step is None else f"step {step} of {path}"
    nbytes = sum(each.stat().st_size for each in written)
    if asked.json:
        found = {"checkpoint": path, "step": step, "file": str(written[-1]), "bytes": nbytes}
        output.as_json(found | {"files": [str(each) for each in written], "names": names, "left_out": left_out})
        return 0
    more = f" and {len(written) - 1} other files" if len(written) > 1 else ""
    output.echo(f"Wrote {written[-1]}{more}: {which}, {nbytes:,} bytes")
    output.echo(f"Entries: {listed(names)}")
    if left_out:
        output.echo(f"Left out, because these values are not tensors: {listed(left_out)}")
    return 0


def _show_passed(each: VerificationResult) -> None:
    output.progress()
    output.warn(f"Skipping {each.path}: {each}")
