"""How an app that never imports stagereg finds its options: Hydra scans the namespace package ``hydra_plugins``.

Packaging places this file there, beside the plugins of other packages; nothing imports it from here.
"""

from stagereg.config.plugins import PluginSource
from stagereg.config.source import RegistrySearchPath, RegistrySource
from stagereg.sweep.interleaved import InterleavedSweeper

__all__ = ["InterleavedSweeper", "PluginSource", "RegistrySearchPath", "RegistrySource"]
