"""The description of one component, read from its signature and its docstring.

``stagereg show`` prints it for one component, ``docs/options.py`` for all of them. Describing a component imports it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

import yaml
from omegaconf import MISSING, OmegaConf

import stagereg.config.docstring as docstring
import stagereg.config.schema as schema
import stagereg.registry as registry
from stagereg.registry import Entry


@dataclass(frozen=True)
class Field:
    """One key of a component's config, or an argument that the program passes to ``stagereg.instantiate``."""

    name: str  # in a nested dataclass with dots, "optimizer.lr"
    type: str  # as a person writes it; of an argument its annotation, empty without one
    required: bool
    help: str  # from its docstring, in one line
    default: str = ""  # as YAML shows it; empty where a value must be given, and for an argument


@dataclass(frozen=True)
class Described:
    """One component."""

    file: str  # "path:line" of its definition
    summary: str  # the first paragraph of its docstring, in one line
    doc: str  # the rest, without the section on arguments
    options: list[Field]
    runtime: list[Field]  # the arguments that are no options


def describe(entry: Entry) -> Described:
    component = entry.load()
    schema.schema(entry)  # it has a config
    options = [field for option in schema.options(component).values() for field in _fields(option.name, option)]
    parameters, helped = inspect.signature(component).parameters, docstring.parameters(component)
    runtime = []
    for name in schema.runtime(component):
        annotation = parameters[name].annotation
        annotation = "" if annotation is inspect.Parameter.empty else annotation
        written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        required = parameters[name].default is inspect.Parameter.empty
        runtime.append(Field(name, written, required, _marked(helped.get(name, ""))))
    summary, _, rest = (inspect.getdoc(component) or "").partition("\n\n")
    try:
        file = f"{inspect.getsourcefile(component)}:{inspect.getsourcelines(component)[1]}"
    except (OSError, TypeError):
        file = entry.file
    # Without the section `Args:`, which becomes the table of options.
    doc = re.sub(r"^(Args|Arguments|Parameters):\n(?:(?:[ \t]+.*)?(?:\n|\Z))*", "", rest, flags=re.MULTILINE)
    return Described(file, _marked(" ".join(summary.split())), _marked(doc.strip()), options, runtime)


def _fields(key: str, option: schema.Option) -> Iterator[Field]:
    default = OmegaConf.to_container(option.default) if OmegaConf.is_config(option.default) else option.default
    nested = next((t for t in (option.hint, *typing.get_args(option.hint)) if dataclasses.is_dataclass(t)), None)
    if nested is None or not isinstance(default, dict):
        shown = "" if default == MISSING else _yaml(default)
        yield Field(key, _type(key, option.hint), default == MISSING, _marked(option.help), shown)
        return
    for name, field in schema.options(typing.cast(Any, nested)).items():
        yield from _fields(f"{key}.{name}", dataclasses.replace(field, default=default[name]))


def _type(key: str, hint: Any) -> str:
    """A type as a person writes it; of a component its kind, by the name of its key."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if key in registry.kinds():
        return key
    if hint is Any:
        return "any"
    if hint in (None, type(None)):
        return "null"
    if origin is Literal:
        return " | ".join(value if isinstance(value, str) else _yaml(value) for value in arguments)
    if origin in (Union, types.UnionType):
        # A config holds a path as text.
        return " | ".join(_type("", a) for a in arguments if typing.get_origin(a) is not os.PathLike)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(member.name for member in hint)
    if kind := schema.factory_of(hint):
        return kind
    named = getattr(origin or hint, "__name__", str(hint))
    inside = ["..." if argument is Ellipsis else _type("", argument) for argument in arguments]
    return f"{named}[{', '.join(inside)}]" if inside else named


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(_simple(value), default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("...").strip()


def _simple(value: Any) -> Any:
    """A value in the types that YAML has, without what only Hydra reads in it."""
    if isinstance(value, dict):
        return {_simple(k): _simple(v) for k, v in value.items() if k not in ("_target_", "_convert_")}
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _marked(text: str) -> str:
    """Text with Sphinx's roles and double backticks as people write them elsewhere, between single ones."""
    text = re.sub(r":[a-z:]+:`~(?:[^`]*\.)?([^`.]+)`", r"`\1`", text)  # only the last name is shown
    text = re.sub(r":[a-z:]+:`(?:stagereg\.)?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)
