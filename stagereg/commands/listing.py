"""``stagereg list``: every component there is, by kind and name, and who provides it. Imports none of them."""

from __future__ import annotations

import argparse

import stagereg.output as output
import stagereg.registry as registry
from stagereg.commands.named import add_plugins_option, import_plugins
from stagereg.errors import UnknownNameError, nearest

__all__ = ["add_to", "run"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``list`` to the commands of ``stagereg``."""
    help_ = "list the stagers, storages, join hooks and joinables there are"
    parser = commands.add_parser(
        "list", help=help_, description=help_[0].upper() + help_[1:] + "; imports none of them."
    )
    parser.add_argument("kind", nargs="?", default="", help=f"only this kind: {', '.join(registry.kinds())}")
    add_plugins_option(parser)
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print the components. Returns 0.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: ``--plugins`` names what cannot be imported.
    """
    if asked.kind and asked.kind not in registry.kinds():
        known = registry.kinds()
        raise UnknownNameError(
            f"No kind {asked.kind!r} of component.{nearest(asked.kind, known)}\nThere is: {', '.join(known)}"
        )
    import_plugins(asked)
    found = [e for e in registry.entries() if asked.kind in ("", e.kind)]
    unreadable = registry.unreadable()
    if asked.json:
        output.as_json(
            {
                "components": [
                    {
                        "kind": e.kind,
                        "name": e.name,
                        "target": e.target,
                        "distribution": e.distribution,
                        "version": e.version,
                        "file": e.file,
                    }
                    for e in found
                ],
                "unreadable": [{"distribution": name, "reason": reason} for name, reason in unreadable],
            }
        )
        return 0
    rows = [(e.kind, e.name, f"{e.distribution} {e.version}".strip() or e.file, e.target) for e in found]
    output.table("", ("kind", "name", "package", "target"), rows)
    if unreadable:
        output.echo(f"\nNot all can be listed of: {', '.join(name for name, _ in unreadable)}. See `stagereg doctor`.")
    return 0
