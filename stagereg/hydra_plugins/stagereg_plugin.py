"""How Hydra finds what stagereg adds to it: Hydra scans the namespace package ``hydra_plugins``.

Packaging places this file there, beside the plugins of other packages, so an app that never imports stagereg has its
options too. Where stagereg is not installed, it calls :func:`offer` when it is imported.
"""

from hydra.core.plugins import Plugins

from stagereg.config.plugins import PluginSource
from stagereg.config.source import RegistrySearchPath, RegistrySource
from stagereg.sweep.interleaved import InterleavedSweeper

__all__ = ["InterleavedSweeper", "PluginSource", "RegistrySearchPath", "RegistrySource", "offer"]


def offer() -> None:
    """Register these plugins with Hydra in this process; registering twice is harmless."""
    plugins = Plugins.instance()
    for plugin in (PluginSource, RegistrySource, RegistrySearchPath, InterleavedSweeper):
        plugins.register(plugin)
