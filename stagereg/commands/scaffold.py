"""``stagereg new``: a complete package for one plugin, which passes its own tests as it is made, or a program to train.

The package is the part of one kind of ``examples/plugin``, under another name; the program is ``examples/train.py`` and
its configs. Both are installed with stagereg. What is made is written whole or not at all, and nothing that is there
already is touched.
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

import stagereg.base.output as output
import stagereg.registry as registry
from stagereg.base.spec import with_article
from stagereg.commands.arguments import add_command
from stagereg.errors import ConfigError

_MODULES = {
    "stager": ("stager", "stager_contract"),
    "joinable": ("average", "hook", "joinable", "training", "joinable_contract"),
    "join_hook": ("timed", "training", "timed_contract"),
    "on_commit": ("after_commit", "after_commit_contract"),
    "keep": ("retention", "retention_contract"),
    "storage": ("storage", "storage_contract"),
    "tier": ("tier", "tier_contract"),
}
"""The modules of the example that each kind needs."""
_PROGRAM = "program"
_TESTS = {
    "stager": ("test_stager",),
    "joinable": ("test_average", "test_join"),
    "join_hook": ("test_timed",),
    "on_commit": ("test_after_commit",),
    "keep": ("test_retention",),
    "storage": ("test_storage",),
    "tier": ("test_tier",),
}
_NAMES = {
    "stager": ("bf16", "Bf16"),
    "joinable": ("ema", "Ema"),
    "join_hook": ("ddp_timed", "TimedDdp"),
    "on_commit": ("journal", "Journal"),
    "keep": ("thinned", "Thinned"),
    "storage": ("zipped", "Zipped"),
    "tier": ("local_ssd", "LocalSsd"),
}
"""The name of the example's component, and how the names of its classes begin."""
_CHOSEN = {
    "joinable": "+joinable@join.joinables.mine",
    "join_hook": "join_hook@join.joinables.model.hook",
    "on_commit": "+on_commit@checkpoint.on_commit.mine",
    "keep": "checkpoint/keep",
}
_RESERVED = ("null", "true", "false", "nan", "inf", "tests", "async", "ddp", "host", "join", "packed")
"""What Hydra reads as something else than a text, and what the example has under the same name."""
_README = """# {distribution}

`{chosen}={name}`: a plugin for stagereg, made by `stagereg new` from its example. Replace what it does.

    pip install -e ".[test]"
    pytest                          # the contract, and what it cannot know
    stagereg check {distribution}   # the same promises as a table
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "make a package for a new plugin: typed, documented, with its contract, green at once; or a program"
    parser = add_command(commands, "new", help_, run)
    kinds = (*_MODULES, _PROGRAM)
    parser.add_argument("kind", choices=kinds, help="what it is to be: %(choices)s", metavar="kind")
    name = "what users choose a plugin by, as in stager=NAME, or a program's folder; lower-case letters, digits and '_'"
    parser.add_argument("name", help=name)
    parser.add_argument("--dir", default=".", metavar="D", help="where to make the folder, the current directory")


def run(asked: argparse.Namespace) -> int:
    """Make the package or the program, and print what to do with it; return 0."""
    folder = make(asked.kind, asked.name, Path(asked.dir))
    made = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    enter = f"cd {shlex.quote(str(folder))}"
    if asked.kind == _PROGRAM:
        steps = {
            f"{enter} && python train.py": "train it on two local ranks, with checkpoints",
            "python train.py data=uneven train.steps=60 stager=pinned_cached": "another stager, on uneven inputs",
            "python train.py --help": "what can be set",
        }
    else:
        steps = {
            f"{enter} && python -m pip install --editable '.[test]'": "make it known by name",
            "python -m pytest": "its tests, green as they are",
            f"stagereg check {folder.name}": "its promises as a table, for anybody",
        }
    if asked.json:
        output.as_json({"kind": asked.kind, "folder": str(folder), "files": made, "next": list(steps)})
        return 0
    kind = asked.kind if asked.kind == "on_commit" else asked.kind.replace("_", " ")
    what = "train.py and its configs" if kind == _PROGRAM else f"the {kind} {asked.name!r}, its contract and its tests"
    output.echo(f"Made {folder}: {what}.", "bold")
    output.table("", (), [[f"  {file}"] for file in made])
    output.echo("Next:")
    output.table("", (), [[step, f"# {why}"] for step, why in steps.items()])
    return 0


def make(kind: str, name: str, parent: Path) -> Path:
    """Write a plugin's package, or a program, whole into a new folder in ``parent``; return the folder."""
    if problem := _problem(kind, name):
        raise ConfigError(f"{name!r} {problem}. Choose another name.")
    folder = parent / name.replace("_", "-")
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} is there already, and nothing in it was touched. Choose another name or --dir.")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as unfinished:
            whole = Path(unfinished) / folder.name
            for file, text in (_program() if kind == _PROGRAM else _files(kind, name)).items():
                (whole / file).parent.mkdir(parents=True, exist_ok=True)
                (whole / file).write_text(text, encoding="utf-8")
            whole.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}. Choose another --dir.") from error
    return folder


def _problem(kind: str, name: str) -> str:
    """Why a plugin and its package, or a program, cannot have a name; empty if they can."""
    if not re.fullmatch("[a-z]([a-z0-9_]{0,26}[a-z0-9])?", name) or "__" in name:
        return "is no name: take up to 28 lower-case letters, digits and '_', a letter first and '_' between others"
    if kind == _PROGRAM:
        return ""
    if name in registry.names(kind):
        return f"is {with_article(kind)} already: {registry.find(kind, name).origin}"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in (*_RESERVED, *_MODULES, *_MODULES[kind]):
        return "cannot name a Python package and an option of Hydra"
    found = importlib.util.find_spec(name)
    return "is a Python module already" if found is not None and found.origin is not None else ""


def _folder(installed: str, of_checkout: str) -> Path:
    there = Path(__file__).parents[1] / installed
    return there if there.is_dir() else Path(__file__).parents[2] / of_checkout


def _program() -> dict[str, str]:
    program = _folder("program", "examples")
    sources = [program / "train.py", *(program / "conf").rglob("*.yaml")]
    return {file.relative_to(program).as_posix(): file.read_text(encoding="utf-8") for file in sources}


def _files(kind: str, name: str) -> dict[str, str]:
    example = _folder("example", "examples/plugin")
    modules = [f"lean_export/{module}.py" for module in _MODULES[kind]]
    sources = [*modules, *(f"tests/{test}.py" for test in _TESTS[kind]), "pyproject.toml"]
    texts = {file: (example / file).read_text(encoding="utf-8") for file in sources}
    described = f'description = "The {kind} {name} for stagereg."'
    project = re.sub('^description = ".*"', described, texts["pyproject.toml"], flags=re.M)
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
