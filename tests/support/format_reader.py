"""Reads a checkpoint as docs/format.md specifies, with only the standard library and numpy: no torch, no stagereg."""

from __future__ import annotations

import base64
import json
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy


class FormatReader:
    """An opened checkpoint. Data files are memory-mapped, and a tensor with a single chunk is a view of its file."""

    def __init__(self, path: Path) -> None:
        self.manifest = json.loads((path / "manifest.json").read_text())
        digest, content = self.manifest["files"]["index.json"], (path / "index.json").read_bytes()
        assert (len(content), zlib.crc32(content)) == (digest["bytes"], digest["crc32"])
        self.index = json.loads(content)
        assert (self.manifest["format"], self.index["format"]) == (2, 1)
        self.files = []
        for name in self.index["files"]:
            with (path / name).open("rb") as file:
                self.files.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            assert len(self.files[-1]) == self.manifest["files"][name]["bytes"]

    def tensor(self, name: str) -> Any:
        """Return a tensor as a numpy array."""
        dtype, shape, chunks = self.index["tensors"][name]
        kind = numpy.dtype("uint16" if dtype == "bfloat16" else dtype)
        whole = numpy.empty(shape, kind)
        for file, offset, length, *place in chunks:
            start, size, strides = (*place, None, None, None)[:3]
            size = shape if size is None else size
            steps = None if strides is None else [step * kind.itemsize for step in strides]
            assert length == kind.itemsize * int(numpy.prod(size)), "the chunk is an archive of torch"
            chunk = numpy.ndarray(size, kind, self.files[file], offset, steps)
            if len(chunks) == 1:
                return chunk
            whole[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))] = chunk
        return whole

    def entry(self, name: str) -> Any:
        """Return an entry of the state as plain containers, with numpy arrays for tensors."""
        return self._value(self.index["state"][name], name)

    def _value(self, tree: Any, name: str) -> Any:
        if isinstance(tree, list):
            return [self._value(item, f"{name}.{i}") for i, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        if not tree:
            return self.tensor(name)
        if tree["type"] == "float":
            return float(tree["value"])
        if tree["type"].startswith("numpy."):
            return numpy.dtype(tree["type"][6:]).type(self._value(tree["value"], ""))
        if tree["type"] == "bytes":
            return base64.b64decode(tree["value"])
        if tree["type"] in ("tuple", "set", "frozenset"):
            return tuple(self._value(item, "") for item in tree["value"])
        if isinstance(tree["value"], dict):
            return {key: self._value(item, f"{name}.{key}") for key, item in tree["value"].items()}
        return {key: self._value(item, f"{name}.{key}") for key, item in tree["value"]}
