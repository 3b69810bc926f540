"""What Hydra finds of stagereg: its options, and its sweeper.

Hydra scans the namespace package ``hydra_plugins``, so an app that never imports stagereg has the options too.
"""

import importlib.util

from stagereg.config.source import RegistrySearchPath, RegistrySource

if importlib.util.find_spec("stagereg.sweep") is not None:
    from stagereg.sweep.interleaved import InterleavedSweeper

__all__ = ["InterleavedSweeper", "RegistrySearchPath", "RegistrySource"]
