"""What to write instead, where a config or a command line names a key or an option that is not there.

Hydra and OmegaConf report such a name without the names near it, and Hydra's advice to append it with ``+`` only moves
the error. This reads the names there are off the error itself, so it holds for typed components, for the keys of an
app's own config and for its config groups alike. For a value that is no member of an enum it does the same, and for
``GROUP=null`` it says how a group is left out.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from stagereg.errors import nearest

__all__ = ["explain"]

_ENUM = re.compile(r"Invalid value '(.*)', expected one of \[(.*)\]")

_NO_OPTION = "a config group takes the name of an option. For none write ~GROUP, in place of GROUP=null"


def explain(error: BaseException | None) -> str:
    """Return one line with the nearest name and all there are, or an empty string for an error about something else.

    Follows the chain of causes.
    """
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            line = _unknown_key(error) or _unknown_member(error)
        elif isinstance(error, MissingConfigException):
            line = _unknown_option(error)
        elif isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
            line = _NO_OPTION
        else:
            line = ""
        if line:
            return line
        error = error.__cause__ or error.__context__
    return ""


def _unknown_key(error: OmegaConfBaseException) -> str:
    owner: Any = error.object_type
    parent: Any = error.parent_node
    if isinstance(owner, type) and dataclasses.is_dataclass(owner):
        takes = [field.name for field in dataclasses.fields(owner)]
        what = owner.__name__
        more = ""
    elif isinstance(parent, DictConfig) and not parent._is_missing() and not parent._is_none():
        takes = [str(key) for key in parent]
        what = parent._get_full_key(None) or "the config"
        more = f". To add it, write +{error.full_key}=..."
    else:
        return ""
    if error.key is None or error.key in takes:
        return ""
    takes = [name for name in takes if not name.startswith("_") and (what != "the config" or name != "hydra")]
    near = nearest(str(error.key), takes)
    return f"{what} takes no {str(error.key)!r}.{near} It takes: {', '.join(takes) or 'nothing'}{more}"


def _unknown_member(error: OmegaConfBaseException) -> str:
    found = _ENUM.match(str(error))
    near = nearest(found[1], found[2].split(", ")) if found else ""
    return f"{error.full_key} is {found[1]!r}.{near} It is one of: {found[2]}" if found and near else ""


def _unknown_option(error: MissingConfigException) -> str:
    if not error.options or not error.missing_cfg_file:
        return ""
    group, _, name = error.missing_cfg_file.rpartition("/")
    options = sorted(error.options)
    return f"there is no {group}={name}.{nearest(name, options)} There is: {', '.join(options)}"
