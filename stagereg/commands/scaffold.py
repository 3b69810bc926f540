"""``stagereg new``: a complete package for one plugin, which passes its own tests as it is made.

It is the part of one kind of ``examples/plugin``, which is installed with stagereg, under another name. It is written
whole or not at all, and nothing that is there already is touched.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import os
import re
import shlex
import tempfile
from pathlib import Path

import stagereg.output as output
import stagereg.registry as registry
from stagereg.errors import ConfigError

__all__ = ["add_to", "make", "run"]

_MODULES = {
    "stager": ("stager", "stager_contract"),
    "joinable": ("average", "hook", "joinable", "training", "joinable_contract"),
    "join_hook": ("timed", "training", "timed_contract"),
}
"""The modules of the example that each kind needs."""
_TESTS = {"stager": ("test_stager",), "joinable": ("test_average", "test_join"), "join_hook": ("test_timed",)}
_NAMES = {"stager": ("bf16", "Bf16"), "joinable": ("ema", "Ema"), "join_hook": ("ddp_timed", "TimedDdp")}
"""The name of the example's component, and how the names of its classes begin."""
_CHOSEN = {"joinable": "+joinable@join.joinables.mine", "join_hook": "join_hook@join.joinables.model.hook"}
_RESERVED = ("null", "true", "false", "nan", "inf", "tests", "async", "ddp", "host", "join")
"""What Hydra reads as something else than a text, and what the example has under the same name."""
_README = """# {distribution}

`{chosen}={name}`: a plugin for stagereg, made by `stagereg new` from its example. Replace what it does.

    pip install -e ".[test]"
    pytest                          # the contract, and what it cannot know
    stagereg check {distribution}   # the same promises as a table
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``new`` to the commands of ``stagereg``."""
    help_ = "make a package for a new plugin: typed, documented, with its contract, green at once"
    parser = output.add_command(commands, "new", help_, run)
    parser.add_argument("kind", choices=_MODULES, help="what it is to be: %(choices)s", metavar="kind")
    parser.add_argument("name", help="what users choose it by, as in stager=NAME; lower-case letters, digits and '_'")
    parser.add_argument("--dir", default=".", metavar="D", help="where to make the folder, the current directory")


def run(asked: argparse.Namespace) -> int:
    """Make the package and print what to do with it. Returns the exit code, 0.

    Raises:
        ConfigError: the name cannot be had, or the folder is there or cannot be made; nothing was written.
    """
    folder = make(asked.kind, asked.name, Path(asked.dir))
    made = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    steps = {
        f"cd {shlex.quote(str(folder))} && python -m pip install --editable '.[test]'": "make it known by name",
        "python -m pytest": "its tests, green as they are",
        f"stagereg check {folder.name}": "its promises as a table, for anybody",
    }
    if asked.json:
        output.as_json({"kind": asked.kind, "folder": str(folder), "files": made, "next": list(steps)})
        return 0
    kind = asked.kind.replace("_", " ")
    output.echo(f"Made {folder}: the {kind} {asked.name!r}, its contract and its tests.", "bold")
    output.table("", (), [[f"  {file}"] for file in made])
    output.echo("Next:")
    output.table("", (), [[step, f"# {why}"] for step, why in steps.items()])
    return 0


def make(kind: str, name: str, parent: Path) -> Path:
    """Write the package for the plugin ``name`` into a new folder in ``parent``, made if need be; return the folder.

    Raises:
        ConfigError: the name cannot be had, or the folder is there or cannot be made; nothing was written.
    """
    if problem := _problem(kind, name):
        raise ConfigError(f"{name!r} {problem}. Choose another name.")
    folder = parent / name.replace("_", "-")
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} is there already, and nothing in it was touched. Choose another name or --dir.")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as unfinished:
            whole = Path(unfinished) / folder.name
            for file, text in _files(kind, name).items():
                (whole / file).parent.mkdir(parents=True, exist_ok=True)
                (whole / file).write_text(text, encoding="utf-8")
            whole.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}. Choose another --dir.") from error
    return folder


def _problem(kind: str, name: str) -> str:
    """Why a plugin and its package cannot have a name; empty if they can."""
    if not re.fullmatch("[a-z]([a-z0-9_]{0,26}[a-z0-9])?", name) or "__" in name:
        return "is no name: take up to 28 lower-case letters, digits and '_', a letter first and '_' between others"
    if name in registry.names(kind):
        return f"is a {kind} already: {registry.find(kind, name).origin}"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in (*_RESERVED, *_MODULES, *_MODULES[kind]):
        return "cannot name a Python package and an option of Hydra"
    found = importlib.util.find_spec(name)
    return "is a Python module already" if found is not None and found.origin is not None else ""


def _files(kind: str, name: str) -> dict[str, str]:
    """The files of the package, by their paths."""
    installed = Path(__file__).parents[1] / "example"
    example = installed if installed.is_dir() else Path(__file__).parents[2] / "examples" / "plugin"
    modules = [f"lean_export/{module}.py" for module in _MODULES[kind]]
    sources = [*modules, *(f"tests/{test}.py" for test in _TESTS[kind]), "pyproject.toml"]
    texts = {file: (example / file).read_text(encoding="utf-8") for file in sources}
    project = re.sub(
        '^description = ".*"', f'description = "The {kind} {name} for stagereg."', texts["pyproject.toml"], flags=re.M
    )
    # Of the entry points, those in modules that are copied.
    others = "".join(f"(?!{module}:)" for module in _MODULES[kind])
    texts["pyproject.toml"] = re.sub(rf'^"\w+\.\w+" = "lean_export\.{others}.*\n', "", project, flags=re.M)
    old, camel = _NAMES[kind]
    quoted = re.compile(rf'(?:(?<=["=])|(?<=: )){old}\b|(?<=\.){old}(?=")')
    distribution = name.replace("_", "-")
    made = {
        "README.md": _README.format(distribution=distribution, chosen=_CHOSEN.get(kind, kind), name=name),
        f"{name}/__init__.py": f'"""The plugin {kind}={name}."""\n',
        f"{name}/py.typed": "",
    }
    for file, text in texts.items():
        text = quoted.sub(name, text).replace(camel, name.title().replace("_", ""))
        made[file.replace("lean_export", name)] = text.replace("lean_export", name).replace("lean-export", distribution)
    return made
