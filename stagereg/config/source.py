"""Provides registered components as Hydra options, through a config source with the scheme ``stagereg://``.

Each registered kind is a config group, and each component an option: ``stager=pinned_cached``. Listing and TAB
completion only read names. Selecting an option imports the component and generates its typed config (``schema``).
Presets are YAML files in ``pkg://stagereg.conf``. Errors of this module are also Hydra composition errors, so Hydra
prints only the message, without a traceback.
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
    """A selected option does not exist, its component cannot be imported, or no config can be generated for it."""


class RegistrySource(ConfigSource):
    """The Hydra config source for the components of the registry, with the scheme ``stagereg://``.

    A second instance, ``stagereg://plugins``, is first on the search path and contains no configs. Hydra queries it
    before reading a config from another source, so it can read the key ``plugins`` of that config first.
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
            with contextlib.suppress(Exception):  # Hydra reports errors in the config
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
        with contextlib.suppress(plugins.PluginError):  # raised later, when an option is selected
            plugins.import_noted()
        # Within one composition, Hydra lists a group only to report that no source has a name in it.
        refusal, self._refusal = self._refusal, None
        # If no name is similar, Hydra's list of all sources is more helpful.
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
        # In a launcher's worker, the same pickle may contain configs of components in these modules.
        for module in state.pop("modules"):
            with contextlib.suppress(RegistryError):
                registry.imported(module)
        self.__dict__.update(state)


class RegistrySearchPath(SearchPathPlugin):
    """Appends the registry and the project's YAML files to every app's search path, after the app's own entries."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        plugins.noted.clear()  # remove the entries of an earlier app
        search_path.prepend("stagereg", "stagereg://plugins")
        # A checkout that is not installed has the files next to the package.
        checkout = f"file://{Path(__file__).parents[2] / 'conf'}"
        search_path.append("stagereg", "pkg://stagereg.conf" if importlib.util.find_spec("stagereg.conf") else checkout)
        search_path.append("stagereg", "stagereg://")


def _split(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.removesuffix(".yaml").strip("/").rpartition("/")
    return _kind(group), name


def _kind(config_path: str) -> str:
    """Return the kind of a config group, without a package such as ``@join.joinables.model`` from TAB completion."""
    group = config_path.partition("@")[0]
    return "keep" if group == "checkpoint/keep" else group  # the group also has presets, which are files
