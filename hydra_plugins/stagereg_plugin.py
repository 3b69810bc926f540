"""What Hydra finds of stagereg: its options, and its sweeper with the options of sweeps.

Hydra scans the namespace package ``hydra_plugins``, so an app that never imports stagereg has the options too.
"""

import importlib.util

from stagereg.config.source import RegistrySearchPath, RegistrySource

if importlib.util.find_spec("stagereg.sweep") is not None:
    from stagereg.sweep.interleaved import InterleavedSweeper, SweepSearchPath

__all__ = ["InterleavedSweeper", "RegistrySearchPath", "RegistrySource", "SweepSearchPath"]
