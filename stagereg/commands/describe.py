"""Describes a component by its signature and its docstring. Imports the component.

``stagereg show`` describes one component; ``docs/options.py`` describes all components.
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
    """A key of a component's config, or an argument that the program passes to ``stagereg.instantiate``."""

    name: str  # with dots for keys of nested dataclasses, such as "optimizer.lr"
    type: str  # in readable form; for an argument, its annotation or ""
    required: bool
    help: str  # description from the docstring, in one line
    default: str = ""  # in YAML; empty for a required key, and for an argument


@dataclass(frozen=True)
class Described:
    """The description of one component."""

    file: str  # "path:line" of the definition
    summary: str  # first paragraph of the docstring, in one line
    doc: str  # rest of the docstring, without the section `Args`
    options: list[Field]
    runtime: list[Field]  # arguments that are not options


def describe(entry: Entry) -> Described:
    component = entry.load()
    schema.schema(entry)  # raises if the component has no valid config
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
    # Remove the section `Args:`, which is shown as the table of options.
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
        # Configs store paths as strings, so PathLike is not shown.
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
    if isinstance(value, dict):
        return {_simple(k): _simple(v) for k, v in value.items() if k not in ("_target_", "_convert_")}
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _marked(text: str) -> str:
    """Replace Sphinx roles and double backticks by single backticks."""
    text = re.sub(r":[a-z:]+:`~(?:[^`]*\.)?([^`.]+)`", r"`\1`", text)  # shows only the last part of the name
    text = re.sub(r":[a-z:]+:`(?:stagereg\.)?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)
