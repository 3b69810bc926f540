"""Identify files of other programs that users may pass as checkpoints, and show how to load them.

Only the first bytes of a file are read. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
from pathlib import Path

from stagereg.checkpoint.store.open_store import local_part
from stagereg.errors import CheckpointError

_log = logging.getLogger(__name__)

_ENDINGS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin")
_MOST_FILES, _LOOKED_INTO = 1000, 5  # maximum number of files that are listed, and that are opened
_WEIGHTS = re.compile(r".*\.safetensors|pytorch_model.*\.bin", re.DOTALL)  # names of files in a model directory
_HEAD_BYTES = 1 << 10
_ZIP = b"PK\x03\x04"
_FIRST_RECORD = b"data.pkl"  # first record in an archive of torch.save or TorchScript
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number as a pickle, before torch 1.6
_PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_LOAD = (
    "  saved = torch.load({path!r}, map_location='cpu', weights_only=True)\n"
    "  model.load_state_dict(saved)  # or the entry with the model, such as saved['model']"
)
_SAFETENSORS = (
    "  saved = safetensors.torch.load_file({path!r})  # after `import safetensors.torch`\n"
    "  model.load_state_dict(saved)"
)
_TRANSFORMERS = (
    "  from transformers import AutoModel\n  model = AutoModel.from_pretrained({path!r})  # or your model's class"
)


def expect_none(path: str) -> None:
    """Raise ``CheckpointError`` if a local file has another format. The message shows code that loads the file."""
    try:
        local = local_part(path)
        found = None if local is None else _what(local)
    except OSError:
        found = None
    if found is not None:
        what, lines = found
        more = f" Load it without stagereg:\n{lines.format(path=str(local))}" if lines else ""
        text = f"{path} is {what}, not a checkpoint of stagereg or of torch.distributed.checkpoint.{more}"
        raise CheckpointError(text)


def warn(root: str) -> None:
    """Log the newest file with weights in a local directory without checkpoints, and code that loads this file."""
    if (local := local_part(root)) is None:
        return
    with contextlib.suppress(OSError), os.scandir(local) as listing:
        there = itertools.islice(listing, _MOST_FILES)
        files = [each for each in there if each.name.endswith(_ENDINGS) and each.is_file()]
        for each in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True)[:_LOOKED_INTO]:
            what, lines = _what(Path(each.path)) or ("", "")
            if lines:
                _log.warning(
                    "stagereg: training starts from scratch, since %s has no checkpoint of stagereg or of "
                    "torch.distributed.checkpoint. It has %s, which is %s. To begin with these weights, write before "
                    "restore():\n%s",
                    *(root, each.name, what, lines.format(path=each.path)),
                )
                return


def _what(path: Path) -> tuple[str, str] | None:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        names = os.listdir(path)
        if "config.json" in names and any(map(_WEIGHTS.fullmatch, names)):
            return "a model directory of Hugging Face", _TRANSFORMERS
        return None
    if not stat.S_ISREG(mode):
        return "not a directory", ""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:  # follows links
        head = file.read(_HEAD_BYTES)
    if head.startswith(_ZIP) and _FIRST_RECORD in head:
        return "a file that torch.save wrote", _LOAD
    if head.startswith(_LEGACY):
        return "a file that torch.save wrote in its format before torch 1.6", _LOAD
    if head.startswith(_PICKLES):
        return "a pickle, which may run code when it is loaded", ""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size - 8:
        return "a safetensors file", _SAFETENSORS
    return "a file", ""
