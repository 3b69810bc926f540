"""What Hydra finds of stagereg: its options, and its sweeper.

Packaging puts this file into the namespace package ``hydra_plugins``, which Hydra scans, so an app that never imports
stagereg has the options too. In a checkout that is merely on the path ``import stagereg`` calls :func:`offer`.
"""

from hydra.core.plugins import Plugins

from stagereg.config.source import RegistrySearchPath, RegistrySource
from stagereg.sweep.interleaved import InterleavedSweeper


def offer() -> None:
    """Register the plugins with Hydra in this process; twice is harmless."""
    plugins = Plugins.instance()
    for plugin in (RegistrySource, RegistrySearchPath, InterleavedSweeper):
        plugins.register(plugin)
