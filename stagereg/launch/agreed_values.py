"""Gives all ranks the same values of resolvers that the program has registered, such as ``${run_id:}``.

Each rank composes the config itself, so a resolver that draws a random number returns a different number on each rank.
The launcher, or rank 0 under ``torchrun``, resolves these values once, and all ranks use the result. Values that depend
on the rank number are resolved on each rank.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

VALUES = "STAGEREG_VALUES"
"""Environment variable in which a launcher passes :func:`resolved` values to its ranks. Other users cannot read it."""
_CALL = re.compile(r"\$\{\s*(?!oc\.|hydra:|now:)[^\W\d][\w.]*\s*:")  # a resolver outside Hydra and OmegaConf
_OF_ONE_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_NO_RANK = "<no rank>"
_LONGEST = 4096  # maximum characters of a value; an environment variable holds up to 128 KiB


def resolved(cfg: Any) -> list[tuple[list[str | int], str]]:
    """Resolve the values in ``cfg``. Return the path and JSON text of each value that does not depend on the rank."""
    from hydra.core.utils import env_override

    if not (paths := _paths(cfg)):
        return []
    draft = copy.deepcopy(cfg)  # resolvers cache values in the config
    with env_override(dict.fromkeys(_OF_ONE_RANK, _NO_RANK)):
        texts = [_text(draft, path) for path in paths]
    return [(path, text) for path, text in zip(paths, texts, strict=True) if text and _NO_RANK not in text]


def take(cfg: Any, values: list[tuple[list[str | int], str]]) -> list[str]:
    """Write :func:`resolved` values into the config. Return the keys whose previous values on this rank differ."""
    from omegaconf import read_write

    paths, differing = _paths(cfg), []
    for path, text in values:
        if path not in paths:
            continue
        if _text(cfg, path) != text:
            differing.append(".".join(map(str, path)))
        node = cfg
        for key in path[:-1]:
            node = node[key]
        with read_write(node):
            node[path[-1]] = json.loads(text)
    return differing


def _paths(cfg: Any) -> list[list[str | int]]:
    from omegaconf import OmegaConf

    def below(node: Any, path: list[str | int]) -> Iterator[list[str | int]]:
        if isinstance(node, (dict, list)):
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from below(value, [*path, key])
        elif isinstance(node, str) and _CALL.search(node):
            yield path

    return [*below(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True), [])]


def _text(cfg: Any, path: list[str | int]) -> str | None:
    """Return the value at a path as JSON; ``None`` if the value cannot be resolved or JSON cannot represent it."""
    from omegaconf import OmegaConf

    try:
        for key in path:
            cfg = cfg[key]
        value = OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg
        text = json.dumps(value)
    except Exception:  # raised again if the program reads the value
        return None
    unchanged = repr(json.loads(text)) == repr(value)
    return text if unchanged and len(text) <= _LONGEST and "${" not in text and "???" not in text else None
