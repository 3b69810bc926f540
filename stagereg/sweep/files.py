"""Reads files of runs and sweeps. The files are untrusted: sizes are limited, and no content is executed."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagereg.base.small_files import read_small

LATEST_TIME = 1 << 37  # latest time that a file may contain, in seconds since the epoch; still valid as a date
YAML_BYTES = 1 << 20  # maximum size of a config file, which the parser reads in ten seconds
_DEEPEST = 100  # maximum nesting of lists and mappings
_MOST = 1 << 63  # largest absolute value of an integer in a file
_DIGITS = 400  # maximum number of digits of a number in YAML
_LINE_BYTES = 1 << 24


def json_of(path: Path) -> dict[str, Any]:
    """Read a mapping from a JSON file. NaN and infinity become ``None``. Raises ``OSError`` or ``ValueError``."""
    try:
        content = _expect_plain(json.loads(read_small(path), parse_constant=lambda name: None))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def yaml_of(path: Path) -> Any:
    """Read a YAML file of Hydra without resolving interpolations. Return ``None`` if the file cannot be read."""
    import yaml

    try:
        return _expect_plain(yaml.load(read_small(path, YAML_BYTES), Loader=_loader()))
    except Exception:  # For a truncated file, the YAML parser may raise many types of exceptions.
        return None


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, including line breaks. Raises ``OSError``, also for a line that is too long."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # Opening a named pipe would block.
        raise OSError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        while line := file.readline(_LINE_BYTES):
            if len(line) == _LINE_BYTES:
                raise OSError(f"{path.name} has a line of more than {_LINE_BYTES:,} bytes")
            yield line


def is_whole(value: Any) -> bool:
    """Return whether a value is a non-negative integer."""
    return type(value) is int and value >= 0


def _expect_plain(content: Any) -> Any:
    """Return ``content``. Raises ``ValueError`` for unsupported types, large integers or deep nesting."""
    level = [content]
    for _ in range(_DEEPEST):
        for each in level:
            if not isinstance(each, (dict, list, str, int, float, bytes, Path, type(None))):
                raise ValueError(f"unsupported type: {type(each).__name__}")
            if isinstance(each, int) and abs(each) > _MOST:
                raise ValueError(f"an integer is beyond {_MOST:,}")
        inside = [each for each in level if isinstance(each, (dict, list))]
        level = [part for each in inside for part in ((*each, *each.values()) if isinstance(each, dict) else each)]
    if level:
        raise ValueError("nested too deeply")
    return content


@functools.cache
def _loader() -> Any:
    import yaml
    from omegaconf._utils import get_yaml_loader  # OmegaConf.load would also parse interpolations

    class Loader(get_yaml_loader()):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if is_alias and not isinstance(node, yaml.ScalarNode):  # Expanding nested aliases could exhaust memory.
                raise yaml.YAMLError("a list or a mapping has an alias")
            if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS:
                raise yaml.YAMLError("a number is too long")
            return node

    return Loader
