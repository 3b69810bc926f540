"""``stagereg list`` and ``stagereg show``: the components there are, and one of them in full.

Listing imports none of them, showing imports the one. ``--plugins`` imports modules first that no package announces, as
``plugins: [module]`` in a config does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

import stagereg.base.output as output
import stagereg.registry as registry
from stagereg.commands.arguments import add_command
from stagereg.errors import UnknownNameError, nearest
from stagereg.registry import Entry


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "list the stagers, storages, join hooks and joinables there are"
    parser = add_command(commands, "list", help_, list_components)
    parser.add_argument("kind", nargs="?", default="", help=f"only this kind: {', '.join(registry.kinds())}")
    add_plugins_option(parser)
    help_ = "show one component: options, arguments, doc, where it is defined"
    parser = add_command(commands, "show", help_, show)
    parser.add_argument("component", help="kind/name, as in stager/pinned_cached, or the name alone if one kind has it")
    add_plugins_option(parser)


def add_plugins_option(parser: argparse.ArgumentParser) -> None:
    help_ = "modules to import first, with commas, as `plugins: [MODULE]` in a config does; also from this directory"
    parser.add_argument("--plugins", default="", metavar="MODULE", help=help_)


def import_plugins(asked: argparse.Namespace) -> None:
    """Import the modules that ``--plugins`` names; what they print goes to stderr."""
    modules = [name.strip() for name in asked.plugins.split(",") if name.strip()]
    if not modules:
        return
    from omegaconf import OmegaConf

    import stagereg.config.plugins as plugins

    sys.path.insert(0, os.getcwd())  # where Python looks for the modules of a script, too
    with _stdout_to_stderr():
        plugins.from_config(OmegaConf.create({"plugins": modules}), "--plugins")


def list_components(asked: argparse.Namespace) -> int:
    if asked.kind:
        registry.names(asked.kind)  # raises if there is no such kind
    import_plugins(asked)
    found = [e for e in registry.entries() if asked.kind in ("", e.kind)]
    unreadable = registry.unreadable()
    if asked.json:
        names = [{"distribution": name, "reason": reason} for name, reason in unreadable]
        output.as_json({"components": [_plain(entry) for entry in found], "unreadable": names})
        return 0
    rows = [(e.kind, e.name, f"{e.distribution} {e.version}".strip() or e.file, e.target) for e in found]
    output.table("", ("kind", "name", "package", "target"), rows)
    if unreadable:
        output.echo(f"\nNot all can be listed of: {', '.join(name for name, _ in unreadable)}. See `stagereg doctor`.")
    return 0


def show(asked: argparse.Namespace) -> int:
    import_plugins(asked)
    entry = find(asked.component)
    with _stdout_to_stderr():
        from stagereg.commands.describe import describe

        shown = describe(entry)
    if asked.json:
        output.as_json(_plain(entry) | dataclasses.asdict(shown))
        return 0
    output.echo(f"{entry.kind}/{entry.name}", "bold")
    output.echo(f"{shown.summary}\n")
    package = f"{entry.distribution} {entry.version}".strip() or "-"
    output.table("", (), [("defined in", shown.file or "-"), ("target", entry.target), ("package", package)])
    output.echo()
    rows = [(f.name, f.type, "must be given" if f.required else f.default, f.help) for f in shown.options]
    output.table("Options" if rows else "It has no options.", ("name", "type", "default", "what it is for"), rows)
    if shown.runtime:
        rows = [(r.name, r.type or "-", f"{'must' if r.required else 'may'} be passed", r.help) for r in shown.runtime]
        output.echo()
        output.table("Arguments that the program passes", ("name", "type", "", "what it is for"), rows)
    output.echo(f"\n{shown.doc}" if shown.doc else "")
    return 0


def _plain(entry: Entry) -> dict[str, str]:
    return {name: vars(entry)[name] for name in ("kind", "name", "target", "distribution", "version", "file")}


def find(text: str) -> Entry:
    """Return the entry that ``text`` names, ``"kind/name"`` (or ``kind=name``) or a name that one kind has."""
    kind, slash, name = text.replace("=", "/", 1).partition("/")
    if slash:
        return registry.find(kind, name)
    having = sorted({e.kind for e in registry.entries() if e.bare == text.partition("@")[0]})
    if len(having) == 1:
        return registry.find(having[0], text)
    if having:
        choices = " or ".join(f"{kind}/{text}" for kind in having)
        raise UnknownNameError(f"{len(having)} kinds have a {text!r}. Choose one: {choices}")
    near = nearest(text, {entry.name for entry in registry.entries()})
    raise UnknownNameError(
        f"No component named {text!r}.{near}\n`stagereg list` lists what there is; --plugins "
        "MODULE imports a module first."
    )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is printed meanwhile: imported components may print, and a JSON document must stay alone.

    This holds for C and for child processes too, so no other thread may print meanwhile.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
