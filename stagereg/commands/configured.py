"""The contract of a stager that has none of its own, as ``stagereg check`` tries it: built from a config."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

from stagereg.config.instantiate import instantiate
from stagereg.stagers.async_stager import AsyncStager
from stagereg.testing import StagerContract

__all__ = ["Configured", "configure"]

_VARIABLE = "STAGEREG_CHECK_CONFIG"
"""Of the environment: the ranks that a promise is tried on get it too."""


def configure(config: Mapping[str, Any], module: str) -> None:
    """Set the config of the stager, with its ``_target_``, for this process and its ranks.

    Args:
        config: as ``stagereg.instantiate`` takes it.
        module: the one that registers the stager; ranks have not imported it.
    """
    os.environ[_VARIABLE] = json.dumps([dict(config), module])


class Configured(StagerContract):
    """Tries every promise on a stager built from the config that was set."""

    def make(self) -> AsyncStager:
        """Build one."""
        config, module = json.loads(os.environ[_VARIABLE])
        importlib.import_module(module)
        made: AsyncStager = instantiate(config)
        return made
