"""``--plugins``: modules that no package announces, imported before a command looks at what there is.

The same as ``plugins: [module]`` in a config: their decorators register, and what they register is listed and shown.
"""

from __future__ import annotations

import argparse
import os
import sys

import stagereg.output as output

__all__ = ["add_plugins_option", "import_plugins"]


def add_plugins_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugins`` to a command."""
    help_ = "modules to import first, with commas, as `plugins: [MODULE]` in a config does; also from this directory"
    parser.add_argument("--plugins", default="", metavar="MODULE", help=help_)


def import_plugins(asked: argparse.Namespace) -> None:
    """Import the modules that ``--plugins`` names; what they print goes to stderr.

    Raises:
        ConfigError: one of them is no module, or cannot be imported.
    """
    modules = [name.strip() for name in asked.plugins.split(",") if name.strip()]
    if not modules:
        return
    from omegaconf import OmegaConf

    import stagereg.config.plugins as plugins

    sys.path.insert(0, os.getcwd())  # where Python looks for the modules of a script, too
    with output.stdout_to_stderr():
        plugins.from_config(OmegaConf.create({"plugins": modules}))
