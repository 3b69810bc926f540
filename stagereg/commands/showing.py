"""``stagereg show``: one component in full: its options, what they are for, who wrote it and where."""

from __future__ import annotations

import argparse
import dataclasses

import stagereg.output as output
import stagereg.registry as registry
from stagereg.commands.named import add_plugins_option, import_plugins
from stagereg.errors import UnknownNameError, nearest
from stagereg.registry import Entry

__all__ = ["add_to", "find", "run"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show`` to the commands of ``stagereg``."""
    help_ = "show one component: signature, options, doc, where it is defined"
    parser = commands.add_parser("show", help=help_, description=help_[0].upper() + help_[1:] + "; imports it.")
    parser.add_argument("component", help="kind/name, as in stager/pinned_cached, or the name alone if one kind has it")
    add_plugins_option(parser)
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print the component. Returns 0.

    Raises:
        UnknownNameError: there is none of that name, or several kinds have it.
        RegistryError: it cannot be loaded.
        ConfigError: ``--plugins`` names what cannot be imported.
    """
    import_plugins(asked)
    entry = find(asked.component)
    with output.stdout_to_stderr():
        from stagereg.commands.describe import describe

        described = describe(entry)
    if asked.json:
        output.as_json(dataclasses.asdict(described))
        return 0
    output.echo(f"{described.kind}/{described.name}", "bold")
    if described.summary:
        output.echo(described.summary)
    output.echo()
    package = f"{described.distribution} {described.version}".strip() or "-"
    output.table("", (), [("defined in", described.file or "-"), ("target", described.target), ("package", package)])
    output.echo(f"\n{described.signature}\n")
    if described.options:
        rows = [(f.name, f.type, "must be given" if f.required else f.default, f.help) for f in described.options]
        output.table("Options", ("name", "type", "default", "what it is for"), rows)
    else:
        output.echo("It has no options.")
    if described.runtime:
        lines = [
            (r.name, r.type or "-", "must be passed" if r.required else "may be passed", r.help)
            for r in described.runtime
        ]
        output.echo()
        output.table("Arguments that the program passes", ("name", "type", "", "what it is for"), lines)
    output.echo("\nExample", "bold")
    output.echo("\n".join(f"  {line}" for line in described.example))
    if described.doc:
        output.echo(f"\n{described.doc}")
    return 0


def find(text: str) -> Entry:
    """Return the entry that ``text`` names, ``"kind/name"`` (or ``kind=name``) or a name that one kind has.

    Raises:
        UnknownNameError: there is none; the message has the nearest one. Or several kinds have it.
        RegistryError: several packages announce it; the message has how to choose.
    """
    kind, slash, name = text.replace("=", "/", 1).partition("/")
    if slash:
        return registry.find(kind, name)
    if text in registry.kinds() and not _having(text):
        raise UnknownNameError(f"{text!r} is a kind. `stagereg list {text}` lists its components.")
    having = _having(text)
    if len(having) > 1:
        choices = " or ".join(f"{kind}/{text}" for kind in having)
        raise UnknownNameError(f"{len(having)} kinds have a {text!r}. Choose one: {choices}")
    if having:
        return registry.find(having[0], text)
    every = sorted({f"{entry.kind}/{entry.name}" for entry in registry.entries()})
    by_name = nearest(text, {one.partition("/")[2] for one in every})
    raise UnknownNameError(f"No component named {text!r}.{by_name}\n`stagereg list` lists what there is.")


def _having(name: str) -> list[str]:
    """The kinds that have a component of that name, with or without the package that provides it."""
    plain = name.partition("@")[0]
    return sorted({e.kind for e in registry.entries() if e.name == name or e.name.partition("@")[0] == plain})
