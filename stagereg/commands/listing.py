"""``stagereg list`` lists all components, and ``stagereg show`` describes one component.

``list`` imports no component; ``show`` imports the component that it describes. The option ``--plugins`` first imports
modules whose components have no entry point, like ``plugins: [module]`` in a config.
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
    help_ = "list the installed components: stagers, storages, joinables and so on"
    parser = add_command(commands, "list", help_, list_components)
    parser.add_argument("kind", nargs="?", default="", help=f"only this kind: {', '.join(registry.kinds())}")
    add_plugins_option(parser)
    help_ = "show a component's options, arguments, documentation and source file"
    parser = add_command(commands, "show", help_, show)
    parser.add_argument("component", help="kind/name, such as stager/pinned_cached, or a name that only one kind has")
    add_plugins_option(parser)


def add_plugins_option(parser: argparse.ArgumentParser) -> None:
    help_ = "comma-separated modules to import first, like `plugins: [MODULE]` in a config"
    parser.add_argument("--plugins", default="", metavar="MODULE", help=help_)


def import_plugins(asked: argparse.Namespace) -> None:
    """Import the modules that the option ``--plugins`` names. Redirects their output to stderr."""
    modules = [name.strip() for name in asked.plugins.split(",") if name.strip()]
    if not modules:
        return
    from omegaconf import OmegaConf

    import stagereg.config.plugins as plugins

    sys.path.insert(0, os.getcwd())  # as if a script in this directory were running
    with _stdout_to_stderr():
        plugins.from_config(OmegaConf.create({"plugins": modules}), "--plugins")


def list_components(asked: argparse.Namespace) -> int:
    if asked.kind:
        registry.names(asked.kind)  # raises for an unknown kind
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
        named = ", ".join(name for name, _ in unreadable)
        output.echo(f"\nSome components of {named} cannot be listed. Run `stagereg doctor` for the reasons.")
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
    rows = [(f.name, f.type, "required" if f.required else f.default, f.help) for f in shown.options]
    output.table("Options" if rows else "No options.", ("name", "type", "default", "description"), rows)
    if shown.runtime:
        rows = [(r.name, r.type or "-", "required" if r.required else "optional", r.help) for r in shown.runtime]
        output.echo()
        output.table("Arguments that the program passes", ("name", "type", "", "description"), rows)
    output.echo(f"\n{shown.doc}" if shown.doc else "")
    return 0


def _plain(entry: Entry) -> dict[str, str]:
    return {name: vars(entry)[name] for name in ("kind", "name", "target", "distribution", "version", "file")}


def find(text: str) -> Entry:
    """Return the entry of a component: ``"kind/name"``, ``"kind=name"``, or a name that only one kind has."""
    kind, slash, name = text.replace("=", "/", 1).partition("/")
    if slash:
        return registry.find(kind, name)
    having = sorted({e.kind for e in registry.entries() if e.bare == text.partition("@")[0]})
    if len(having) == 1:
        return registry.find(having[0], text)
    if having:
        choices = " or ".join(f"{kind}/{text}" for kind in having)
        raise UnknownNameError(f"{len(having)} kinds have a component named {text!r}. Name one: {choices}")
    near = nearest(text, {entry.name for entry in registry.entries()})
    more = "`stagereg list` lists all components; --plugins MODULE imports a module first."
    raise UnknownNameError(f"No component is named {text!r}.{near}\n{more}")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, so that an imported component cannot print into the JSON output.

    The redirection affects C code and child processes too. No other thread may print during the redirection.
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
