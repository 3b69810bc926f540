"""The files of a run or a sweep, which other people may have made: read within bounds, with nothing in them called."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagereg.base.small_files import read_small

LATEST_TIME = 1 << 37  # seconds since the epoch; a date can be made of it
YAML_BYTES = 1 << 20  # a config has at most so many: a parser takes ten seconds for them
_DEEPEST = 100  # levels of lists and mappings in a file
_MOST = 1 << 63  # the largest whole number in a file
_DIGITS = 400  # a number in YAML has at most so many
_LINE_BYTES = 1 << 24


def json_of(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; ``None`` for NaN and infinity. Raises: ``OSError``, ``ValueError``."""
    try:
        content = _expect_plain(json.loads(read_small(path), parse_constant=lambda name: None))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no mapping")
    return content


def yaml_of(path: Path) -> Any:
    """Return the content of a file of Hydra's, with nothing interpolated; ``None`` if it cannot be read."""
    import yaml

    try:
        return _expect_plain(yaml.load(read_small(path, YAML_BYTES), Loader=_loader()))
    except Exception:  # whatever YAML raises for a torn file
        return None


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that may be long, each with its line break. Raises: ``OSError``."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
        raise OSError(f"{path.name} is no regular file")
    with path.open("rb") as file:
        while line := file.readline(_LINE_BYTES):
            if len(line) == _LINE_BYTES:
                raise OSError(f"{path.name} has a line of more than {_LINE_BYTES:,} bytes")
            yield line


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number from 0 on."""
    return type(value) is int and value >= 0


def _expect_plain(content: Any) -> Any:
    """Raise ``ValueError`` unless all in ``content`` is plain data that can be shown and copied."""
    level = [content]
    for _ in range(_DEEPEST):
        for each in level:
            if not isinstance(each, (dict, list, str, int, float, bytes, Path, type(None))):
                raise ValueError(f"it has a {type(each).__name__}")
            if isinstance(each, int) and abs(each) > _MOST:
                raise ValueError(f"a whole number in it is beyond {_MOST:,}")
        inside = [(*each, *each.values()) if isinstance(each, dict) else each for each in level if _has_parts(each)]
        level = [part for each in inside for part in each]
    if level:
        raise ValueError("it is nested too deeply")
    return content


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, list))


@functools.cache
def _loader() -> Any:
    import yaml
    from omegaconf._utils import get_yaml_loader  # of which OmegaConf.load makes more: it parses interpolations

    class Loader(get_yaml_loader()):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if is_alias and not isinstance(node, yaml.ScalarNode):  # a few lines of them mean more than memory has
                raise yaml.YAMLError("a list or a mapping has an alias")
            if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS:
                raise yaml.YAMLError("a number is too long")
            return node

    return Loader
