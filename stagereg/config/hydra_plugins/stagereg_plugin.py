"""For editable installations made before this file moved to ``stagereg/hydra_plugins``; goes with the last of them."""

from stagereg.hydra_plugins.stagereg_plugin import InterleavedSweeper, PluginSource, RegistrySearchPath, RegistrySource

__all__ = ["InterleavedSweeper", "PluginSource", "RegistrySearchPath", "RegistrySource"]
