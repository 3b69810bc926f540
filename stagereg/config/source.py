"""Registered components as Hydra options: the config source ``stagereg://``, and its place on the search path.

Each kind of the registry is a config group, each name in it an option: ``stager=pinned_cached``. Listing and TAB
completion read names only and import nothing but the modules that the app's config names as its plugins; choosing an
option imports that one component and makes its typed config from its signature (``schema``). Presets and the
composition itself are YAML files, in ``pkg://stagereg.conf``.

Errors raised here are Hydra's composition errors too, so Hydra prints their message and no traceback.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

import stagereg.config.schema as schema
import stagereg.registry as registry
from stagereg.config.plugins import NamedPlugins, PluginError, PluginSource
from stagereg.errors import RegistryError, StageregError, UnknownNameError, nearest

__all__ = ["OptionError", "RegistrySearchPath", "RegistrySource", "UnknownOptionError"]


class OptionError(RegistryError, ConfigCompositionException):
    """A chosen option cannot be loaded: its package is broken, or its signature has no config."""


class UnknownOptionError(UnknownNameError, ConfigCompositionException):
    """A group of ours was given a name that no source knows; the message has the nearest one."""


class RegistrySource(ConfigSource):
    """Serve the components of the registry as Hydra configs, under the scheme ``stagereg://``."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self._refused: tuple[str, str] | None = None
        self._plugins = NamedPlugins.current or NamedPlugins()

    @staticmethod
    def scheme() -> str:
        return "stagereg"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        kind = _kind(config_path)
        return config_path == "" or (kind in registry.kinds() and bool(registry.names(kind)))

    def is_config(self, config_path: str) -> bool:
        kind, name = _split(config_path)
        if kind not in registry.kinds():
            return False
        self._plugins.load()
        try:
            registry.find(kind, name)
        except StageregError:
            self._refused = (kind, name)
            return False
        self._refused = None
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        if config_path == "":
            groups = [kind for kind in registry.kinds() if registry.names(kind)]
            return [] if results_filter == ObjectType.CONFIG else groups
        if not self.is_group(config_path) or results_filter == ObjectType.GROUP:
            return []
        with contextlib.suppress(PluginError):  # raised when an option is chosen: a listing goes on without
            self._plugins.load()
        self._explain_refusal(_kind(config_path))
        return registry.names(_kind(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        kind, name = _split(config_path)
        try:
            entry = registry.find(kind, name)
            config = OmegaConf.structured(schema.schema(entry))
        except UnknownNameError as error:
            raise ConfigLoadError(str(error)) from error
        except StageregError as error:
            raise OptionError(str(error)) from error
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": None})

    def _explain_refusal(self, kind: str) -> None:
        """Raise the near-miss error, if ``kind`` is being listed because a name in it was found nowhere.

        Hydra asks every source for a config, then reports the miss with all options of the group: only then does a
        listing follow a refusal within one composition. Claiming near misses in ``is_config`` instead would hide
        options that a later source has.
        """
        refused, self._refused = self._refused, None
        if refused is None or refused[0] != kind:
            return
        try:
            registry.find(*refused)
        except UnknownNameError as error:
            # Where none is near, Hydra's list of all sources helps more.
            if "@" in refused[1] or nearest(refused[1], registry.names(kind)):
                raise UnknownOptionError(str(error)) from None
        except RegistryError as error:
            raise OptionError(str(error)) from None


class RegistrySearchPath(SearchPathPlugin):
    """Append the registry and the shipped YAML files to every app's search path, behind the app's own.

    The source that only looks for plugins goes before all.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        NamedPlugins.current = NamedPlugins(search_path)
        search_path.prepend("stagereg", f"{PluginSource.scheme()}://")
        # A checkout that is not installed has the files beside the package.
        beside = f"file://{Path(__file__).parents[2] / 'conf'}"
        shipped = "pkg://stagereg.conf" if importlib.util.find_spec("stagereg.conf") else beside
        for path in (f"{RegistrySource.scheme()}://", shipped):
            search_path.append("stagereg", path)


def _split(config_path: str) -> tuple[str, str]:
    kind, _, name = config_path.removesuffix(".yaml").strip("/").rpartition("/")
    return kind, name


def _kind(config_path: str) -> str:
    """The kind of a group; TAB completion asks for one with its package, ``joinable@join.joinables.model``."""
    return config_path.partition("@")[0]
