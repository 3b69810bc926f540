"""Registered components as Hydra options: the config source ``stagereg://``, and its place on the search path.

Each kind of the registry is a config group, each name an option: ``stager=pinned_cached``. Listing and TAB completion
read names only; choosing an option imports that component and makes its typed config (``schema``). Presets are YAML
files in ``pkg://stagereg.conf``. Errors raised here are Hydra's composition errors too, which Hydra prints as a
message.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

import stagereg.config.plugins as plugins
import stagereg.config.schema as schema
import stagereg.registry as registry
from stagereg.errors import RegistryError, StageregError, UnknownNameError


class OptionError(RegistryError, ConfigCompositionException):
    """A chosen option is not there, or cannot be loaded: its package is broken, or its signature has no config."""


class RegistrySource(ConfigSource):
    """Serve the components of the registry as Hydra configs, under the scheme ``stagereg://``.

    At the head of the search path, as ``stagereg://plugins``, it has no config: there Hydra asks it for each one that
    it is about to read, so it notes the plugins of that.
    """

    _refusal: RegistryError | None = None

    @staticmethod
    def scheme() -> str:
        return "stagereg"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return _kind(config_path) in ("", *registry.kinds())

    def is_config(self, config_path: str) -> bool:
        if self.path == "plugins":
            plugins.note(config_path)
            return False
        kind, name = _split(config_path)
        if kind not in registry.kinds():
            return False
        plugins.import_noted()
        self._refusal = None
        try:
            registry.find(kind, name)
        except RegistryError as error:
            self._refusal = error
        return self._refusal is None

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        kind = _kind(config_path)
        if not self.is_group(config_path) or results_filter == (ObjectType.GROUP if kind else ObjectType.CONFIG):
            return []
        if not kind:
            return registry.kinds()
        with contextlib.suppress(plugins.PluginError):  # raised when an option is chosen: a listing goes on without
            plugins.import_noted()
        # Within one composition, Hydra lists a group only after a name in it was found in no source, to report that.
        refusal, self._refusal = self._refusal, None
        # Where no name is near, Hydra's list of all sources helps more.
        if refusal is not None and (type(refusal) is not UnknownNameError or "Did you mean" in str(refusal)):
            raise OptionError(f"{refusal}\n{plugins.NAMED}" if type(refusal) is UnknownNameError else str(refusal))
        return registry.names(kind)

    def load_config(self, config_path: str) -> ConfigResult:
        try:
            config = OmegaConf.structured(schema.schema(registry.find(*_split(config_path))))
        except StageregError as error:
            raise OptionError(str(error)) from error
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": None})

    def __getstate__(self) -> dict[str, Any]:
        modules = {own.target.partition(":")[0]: None for own in registry.REGISTRY.decorated}
        return {**self.__dict__, "modules": [module for module in modules if module != "__main__"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A launcher's worker: what follows in the same pickle may be the config of a component of one of these.
        for module in state.pop("modules"):
            with contextlib.suppress(RegistryError):
                registry.imported(module)
        self.__dict__.update(state)


class RegistrySearchPath(SearchPathPlugin):
    """Append the registry and the shipped YAML files to every app's search path, behind the app's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        plugins.noted.clear()  # of the app that was set up before
        search_path.prepend("stagereg", "stagereg://plugins")
        # A checkout that is not installed has the files beside the package.
        beside = f"file://{Path(__file__).parents[2] / 'conf'}"
        search_path.append("stagereg", "pkg://stagereg.conf" if importlib.util.find_spec("stagereg.conf") else beside)
        search_path.append("stagereg", "stagereg://")


def _split(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.removesuffix(".yaml").strip("/").rpartition("/")
    return _kind(group), name


def _kind(config_path: str) -> str:
    """The kind of a group; TAB completion asks for one with its package, ``joinable@join.joinables.model``."""
    group = config_path.partition("@")[0]
    return "keep" if group == "checkpoint/keep" else group  # beside the presets, which are files
