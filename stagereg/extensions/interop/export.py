"""Export a checkpoint as files that do not need stagereg: a ``.pt`` for ``torch.load``, or safetensors.

One process without a process group writes the files; sharded tensors are written whole. A ``.pt`` has all values, and
the process needs memory for all of them. A ``.safetensors`` has only the tensors, and is written tensor by tensor
(layout: huggingface.co/docs/safetensors, "Format"). An export to several files includes an index for transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import torch

import stagereg.checkpoint.format.encoding as encoding
from stagereg.base.pages import view_of
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.manifest import new_token
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.advice import causes
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.interop.opened import OpenCheckpoint, tensors_of
from stagereg.extensions.interop.refusing import refusing
from stagereg.extensions.interop.safetensors import DTYPES, METADATA, head

SAFETENSORS = ".safetensors"
SUFFIXES = (".pt", ".pth", SAFETENSORS)  # valid suffixes of an exported file
_INDEX = ".index.json"
_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # float8 has scales in other tensors
_Kinds: TypeAlias = dict[str, tuple[torch.dtype, torch.Size]]
_Contents: TypeAlias = dict[Path, Callable[[IO[bytes]], object]]


class TensorOptions(NamedTuple):
    """Options for the tensors in a ``.safetensors``."""

    dtype: torch.dtype | None = None  # dtype of floating-point tensors of 16 bits or more; ``None`` keeps their dtypes
    # maximum size of a file in bytes; a larger tensor gets its own file; ``None`` writes one file
    file_bytes: int | None = None


class Exported(NamedTuple):
    """The result of :func:`export`."""

    names: list[str]  # entries of the state with at least one value in the files
    left_out: list[str]  # dotted names of values that are not tensors, which a ``.safetensors`` cannot store
    files: list[Path]  # the written files; the last file is the file to open


def export(checkpoint: OpenCheckpoint, only: str | None, out: Path, replace: bool, options: TensorOptions) -> Exported:
    """Write a checkpoint to the file ``out``, or to several numbered files. Raises ``CheckpointError``, ``OSError``.

    ``only`` selects one entry by name, and this name is then removed from the start of tensor names. The suffix of
    ``out`` selects the format; only ``.safetensors`` uses ``options``. ``replace`` allows overwriting files. Do not
    use ``checkpoint`` after the export.
    """
    parts = checkpoint.structures if only is None else {only: checkpoint.structure(only)}
    if out.suffix != SAFETENSORS:
        known: dict[int, tuple[Any, Any]] = {}
        with refusing(checkpoint.path):
            checkpoint.files.read([leaf for structure in parts.values() for leaf in encoding.marks(structure)])
            state = {name: _without_numpy(encoding.fill(structure), known) for name, structure in parts.items()}
        _write({out: partial(_write_pt, state if only is None else state[only])}, [out], replace)
        return Exported(sorted(state), [], [out])
    prefix = "" if only is None else f"{only}."
    part_of = {name: part for part, structure in parts.items() for name, _ in encoding.leaves(structure, part)}
    tensors = tensors_of(parts)
    others = sorted(name.removeprefix(prefix) for name in part_of.keys() - tensors.keys())
    leaves = {name.removeprefix(prefix): leaf for name, leaf in tensors.items()}
    if not leaves:
        raise CheckpointError(
            f"{'The checkpoint' if only is None else repr(only)} has no tensors. Write a .pt instead of a .safetensors."
        )
    contents = _tensor_files(checkpoint, leaves, out, options)
    _write(contents, _family(out), replace)
    return Exported(sorted({part_of[name] for name in tensors}), others, [*contents])


def _write(contents: _Contents, former: Sequence[Path], replace: bool) -> None:
    """Write and flush all files under temporary names, then rename them one by one.

    A single file is replaced atomically. ``former`` lists the files of an earlier export: files in it that are not
    replaced are deleted before the first rename, so that new and old files are never mixed.
    """
    _expect_free(former, replace)
    beside = {out: out.with_name(f".{out.name}.{new_token()}.tmp") for out in contents}
    try:
        for out, write in contents.items():
            with beside[out].open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        _expect_free(former, replace)
        for path in former:
            if [path] != [*contents]:
                path.unlink(missing_ok=True)
        for out, path in beside.items():
            path.replace(out)
    finally:
        for path in beside.values():
            with contextlib.suppress(OSError):
                path.unlink()


def _expect_free(paths: Iterable[Path], replace: bool) -> None:
    for there in filter(os.path.lexists, paths):
        if there.is_dir() and not there.is_symlink():
            raise CheckpointError(f"{there} is a directory, so no file can be written there. Choose another path.")
        if not replace:
            raise CheckpointError(f"{there} already exists. Pass --force to replace it.")


def _tensor_files(saved: OpenCheckpoint, leaves: Mapping[str, Leaf], out: Path, options: TensorOptions) -> _Contents:
    kinds = {name: (_dtype(leaf, options.dtype), leaf.stored.shape) for name, leaf in leaves.items()}
    for name, (dtype, _) in kinds.items():
        if dtype not in DTYPES or name == METADATA:
            raise CheckpointError(f"safetensors does not support {name!r} of dtype {dtype}. Write a .pt instead.")
        if leaves[name].stored.is_subclass:
            raise CheckpointError(f"safetensors cannot store {name!r}, which wraps other tensors. Write a .pt instead.")
    about = {"format": "pt"} if saved.step is None else {"format": "pt", "step": str(saved.step)}
    divided = _divided(kinds, options.file_bytes)
    stems = [f"{out.stem}-{i:05}-of-{len(divided):05}" for i in range(1, len(divided) + 1)]  # as in transformers
    paths = [out] if len(divided) == 1 else [out.with_name(f"{stem}{SAFETENSORS}") for stem in stems]
    by_path = dict(zip(paths, divided, strict=True))
    write = partial(_write_tensors, saved.files, leaves)
    contents: _Contents = {path: partial(write, each, about) for path, each in by_path.items()}
    if len(divided) > 1:
        contents[out.with_name(out.name + _INDEX)] = partial(_write_index, by_path)
    return contents


def _dtype(leaf: Leaf, wanted: torch.dtype | None) -> torch.dtype:
    own: torch.dtype = leaf.stored.dtype
    return wanted if wanted is not None and own in _CAST else own


def _divided(kinds: _Kinds, most: int | None) -> list[_Kinds]:
    """Assign the tensors, in order, to files of at most ``most`` bytes. A larger tensor gets its own file."""
    divided: list[_Kinds] = [{}]
    size = 0
    for name, (dtype, shape) in kinds.items():
        nbytes = shape.numel() * dtype.itemsize
        if most is not None and divided[-1] and size + nbytes > most:
            divided.append({})
            size = 0
        divided[-1][name] = dtype, shape
        size += nbytes
    return divided


def _family(out: Path) -> list[Path]:
    """Return the paths that an export to ``out`` may have written: the index, the file, and existing numbered files."""
    pattern = re.escape(out.stem) + r"-\d{5}-of-\d{5}" + re.escape(SAFETENSORS)
    several = sorted(path for path in out.parent.iterdir() if re.fullmatch(pattern, path.name))
    return [out.with_name(out.name + _INDEX), out, *several]


def _write_tensors(
    files: CheckpointFiles, leaves: Mapping[str, Leaf], kinds: _Kinds, about: Mapping[str, str], file: IO[bytes]
) -> None:
    # Use the order of the safetensors library: first by element size, so that every tensor is aligned, then by name.
    order = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    file.write(head({name: kinds[name] for name in order}, about))
    for name in order:
        leaf = leaves[name]
        with refusing(f"{name!r:.100} of {files.path}"):
            files.read([leaf])
        if leaf.value.numel():
            file.write(view_of(_cast(name, leaf.value, kinds[name][0]).contiguous()))
        leaf.value = None


def _cast(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = x.to(dtype)
    # isinf() allocates memory, so the original tensor is checked only if the converted tensor has infinite values.
    if cast is not x and bool(cast.isinf().any()) and bool((cast.isinf() & ~x.isinf()).any()):
        raise CheckpointError(f"{name!r:.100} has values that are too large for {dtype}; use another dtype.")
    return cast


def _write_index(divided: Mapping[Path, _Kinds], file: IO[bytes]) -> None:
    total = sum(shape.numel() * dtype.itemsize for kinds in divided.values() for dtype, shape in kinds.values())
    names = {name: path.name for path, kinds in divided.items() for name in kinds}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
    file.write(f"{text}\n".encode())


def _without_numpy(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """Replace NumPy numbers in a structure with Python numbers, because ``weights_only=True`` rejects NumPy.

    Dicts and lists change in place. ``known`` maps the id of each visited container to the container and its result.
    """
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return value.item() if type(value).__module__ == "numpy" else value
    if id(value) not in known:
        made = value
        known[id(value)] = value, made
        if isinstance(value, (dict, list)):
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                value[key] = _without_numpy(item, known)
        elif type(value) in (tuple, set, frozenset):
            made = type(value)(_without_numpy(item, known) for item in value)
        known[id(value)] = value, made
    return known[id(value)][1]


def _write_pt(state: Any, file: IO[bytes]) -> None:
    """Write a ``.pt``. Raises ``CheckpointError`` if ``torch.load(weights_only=True)`` rejects it."""
    try:
        torch.save(state, file)
    except Exception as error:  # torch may raise its own error after an OSError of the file
        failed = next((each for each in causes(error) if isinstance(each, OSError)), None)
        text = f"torch.save failed: {reason(error)}. To export only the tensors, write a .safetensors."
        raise failed or CheckpointError(text) from (None if failed else error)
    file.flush()
    try:
        torch.load(str(file.name), map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        text = f"torch.load(weights_only=True) rejects this export: {reason(error)}. Write a .safetensors instead."
        raise CheckpointError(text) from error
