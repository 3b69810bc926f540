"""``stagereg new``: a complete package for one plugin, which passes its own tests as it is made.

The package is made from the templates beside this file: what every package has (``common``), and what its kind adds.
It is written whole or not at all, and nothing that is there already is touched.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
import string
import sys
import tempfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import stagereg.output as output
import stagereg.registry as registry
from stagereg._version import __version__
from stagereg.errors import ConfigError

__all__ = ["add_to", "make", "run"]

_KINDS = {"stager": "stager", "joinable": "joinable", "join_hook": "hook"}
"""The kinds there are templates for, and the module of each package that has the component."""
_EXAMPLES = {
    "stager": "stager",
    "joinable": "+joinable@join.joinables.counter",
    "join_hook": "join_hook@join.joinables.model.hook",
}
"""What users write before ``=NAME`` to choose a component of each kind."""
_SUFFIX = ".in"
_LONGEST = 28
"""Characters of a name: what a template imports by it fits into a line then."""
_LEGAL = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
_CLASSES = ("Ddp", "DdpHook", "Host", "Join", "JoinHook", "Joinable", "Stager")
"""Names of which the templates would make a class that stagereg has, beside the import of that one."""
_HYDRA_LITERALS = ("null", "true", "false", "nan", "inf")
"""What Hydra reads as something else than a text in ``stager=...``."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``new`` to the commands of ``stagereg``."""
    help_ = "make a package for a new plugin: typed, documented, with its contract, green at once"
    parser = commands.add_parser("new", help=help_, description=help_[0].upper() + help_[1:] + ".")
    parser.add_argument("kind", choices=_KINDS, help="what it is to be: %(choices)s", metavar="kind")
    parser.add_argument("name", help="what users choose it by, as in stager=NAME; letters, digits, '_' and '-'")
    parser.add_argument("--dir", default=".", metavar="D", help="where to make the folder, the current directory")
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Make the package and print what to do with it. Returns the exit code, 0.

    Raises:
        ConfigError: the name cannot be had, or the folder is there or cannot be made; nothing was written.
    """
    folder, made = make(asked.kind, asked.name, Path(asked.dir))
    steps = [
        f"cd {shlex.quote(str(folder))} && python -m pip install --editable '.[test]'",
        "python -m pytest",
        f"stagereg check {folder.name}",
    ]
    if asked.json:
        output.as_json({"kind": asked.kind, "name": asked.name, "folder": str(folder), "files": made, "next": steps})
        return 0
    output.echo(f"Made {folder}: the {_label(asked.kind)} {asked.name!r}, its contract and its tests.", "bold")
    output.table("", (), [[f"  {file}"] for file in made])
    output.echo("Next:")
    why = ["make it known by name", "its tests, green as they are", "its promises as a table, for anybody"]
    output.table("", (), [[step, f"# {reason}"] for step, reason in zip(steps, why, strict=True)])
    return 0


def make(kind: str, name: str, parent: Path) -> tuple[Path, list[str]]:
    """Write the package for the plugin ``name`` into a new folder in ``parent``, which is made if need be.

    Returns:
        The folder, and the files in it, as paths relative to it, sorted.

    Raises:
        ConfigError: the name cannot be had, or the folder is there or cannot be made; nothing was written.
    """
    _refuse_name(kind, name)
    values = _values(kind, name)
    folder = parent / values["distribution"]
    if folder.is_symlink() or folder.exists():
        raise ConfigError(f"{folder} is there already, and nothing in it was touched. Choose another name or --dir.")
    if parent.exists() and not parent.is_dir():
        raise ConfigError(f"{parent} is a file; --dir takes a folder.")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as unfinished:
            whole = Path(unfinished) / folder.name
            for template in ("common", kind):
                _fill(files("stagereg.commands") / "templates" / template, whole, values)
            whole.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}. Choose another --dir.") from error
    return folder, sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _fill(template: Traversable, target: Path, values: dict[str, str]) -> None:
    """Write the files of a folder of templates, and of those in it, with ``values`` filled in."""
    target.mkdir(parents=True, exist_ok=True)
    for source in template.iterdir():
        name = source.name.removesuffix(_SUFFIX).replace("PACKAGE", values["package"])
        if source.is_dir():
            _fill(source, target / name, values)
        elif source.name.endswith(_SUFFIX):
            text = string.Template(source.read_text(encoding="utf-8")).substitute(values)
            # An archive or a code host may drop a file that begins with a dot, so no template does.
            hidden = "." if name == "gitignore" else ""
            (target / (hidden + name)).write_text(text, encoding="utf-8")


def _refuse_name(kind: str, name: str) -> None:
    if not _LEGAL.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a plugin and its package: begin with a letter, go on with letters, digits, '_' "
            "and '-', and end with a letter or digit."
        )
    if len(name) > _LONGEST:
        raise ConfigError(f"{name!r} has {len(name)} characters: users type it, so {_LONGEST} at most.")
    if name.lower() in _HYDRA_LITERALS:
        raise ConfigError(f"{name!r} means something else in {kind}={name}, where Hydra does not read it as a name.")
    if name in registry.names(kind):
        raise ConfigError(
            f"There is a {kind} {name!r} already: {registry.find(kind, name).origin}.\nChoose another name."
        )
    package = _package(name)
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in ("tests", "src"):
        raise ConfigError(f"{name!r} cannot name a Python package. Choose another name, such as 'my_{package}'.")
    if _is_a_module(package):
        raise ConfigError(
            f"There is a Python module {package!r} already, and the new package would hide it or be hidden.\n"
            f"Choose another name, such as 'my_{package}'."
        )


def _is_a_module(name: str) -> bool:
    """Whether ``import name`` finds something here; a bare folder of that name does not count."""
    if name in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return True
    return spec is not None and spec.origin is not None


def _values(kind: str, name: str) -> dict[str, str]:
    """What the templates leave open."""
    camel = "".join(part[:1].upper() + part[1:] for part in re.split(r"[_-]+", name))
    if camel in _CLASSES:
        camel = f"My{camel}"
    noun = {"stager": "Stager", "joinable": "Joinable", "join_hook": "Hook"}[kind]
    component, hook = camel.removesuffix(noun) + noun, f"{camel}Hook"
    exports = sorted([component, hook] if kind == "joinable" else [component])
    return {
        "kind": kind,
        "label": _label(kind),
        "name": name,
        "example": f"{_EXAMPLES[kind]}={name}",
        "distribution": _package(name).replace("_", "-"),
        "package": _package(name),
        "module": _KINDS[kind],
        "component": component,
        "hook": hook,
        "contract": f"{camel}Contract",
        "camel": camel,
        "exports": ", ".join(exports),
        "all": ", ".join(f'"{export}"' for export in exports),
        "version": ".".join(__version__.split(".")[:2]),
    }


def _label(kind: str) -> str:
    return kind.replace("_", " ")


def _package(name: str) -> str:
    return re.sub(r"[_-]+", "_", name).lower()
