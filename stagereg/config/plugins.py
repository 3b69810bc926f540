"""``plugins: [my_module]``: modules that a config names, imported before its options are composed.

The decorators of such a module have then registered what the config goes on to choose: ``stager=mine``. Hydra has no
step for that, but it asks every source on the search path for every config it is about to read, the first one first.
:class:`PluginSource` is that first one. It has no config of its own, and notes the ``plugins`` of those that become
part of the root of the config: the primary one, those beside it, and those of any group with ``# @package _global_``.

Promises: a module is imported when an option of one of the registry's kinds is about to be looked up, not before, so an
app that has none of these options may mean something else by ``plugins``; the lists of several configs add up, and an
interpolation in one is resolved within its own file; an error about a module fits on one screen. It holds wherever
Hydra composes: in runs, sweeps and their workers, TAB completion, ``--cfg`` and the compose API.

Hydra goes through a defaults list from its end. So the primary config is always in time, with all that defaults lists
name without a choice (``- base``); a chosen one (``experiment: fast``) is in time when it comes after the option that
needs its modules, where it has to be to override anything. Not seen are overrides, which are for
:func:`from_overrides` (``stagereg.main`` calls it), and what only ``hydra.searchpath`` on the command line adds.

A config that names a module runs its code: it has to be trusted as the app is.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import stagereg.registry as registry
from stagereg.errors import ConfigError, RegistryError, nearest

__all__ = ["NamedPlugins", "PluginError", "PluginSource", "from_config", "from_overrides"]

_KEY = "plugins"
_READABLE = ("file", "pkg", "structured")
"""Schemes of the sources that are asked for configs: Hydra's own, which have no side effects and need no network."""


class PluginError(ConfigError, ConfigCompositionException):
    """A config names as a plugin what cannot be imported, or what is no module."""


class NamedPlugins:
    """What the configs of one app name as plugins.

    Attributes:
        current: that of the app set up last; global, as Hydra makes the sources of its search path without arguments.
        imported: the modules imported so far, in this order, by any app: a process that goes on with configs of this
            one needs them too.
    """

    current: NamedPlugins | None = None
    imported: dict[str, None] = {}  # noqa: RUF012

    def __init__(self, search_path: ConfigSearchPath | None = None) -> None:
        self._search_path = search_path
        self._more_paths: list[str] = []
        self._noted: dict[str, Any] = {}

    def note(self, config_path: str) -> None:
        """Read what the config at ``config_path``, if it is there, names; Hydra reports what is wrong with it."""
        with contextlib.suppress(Exception):
            self._note(config_path, set())

    def load(self) -> None:
        """Import what was noted.

        Raises:
            PluginError: one of it cannot be imported, or is no module.
        """
        for config_path in list(self._noted):
            _import_all(self._noted[config_path], f"The config {config_path.removesuffix('.yaml')!r}")
            del self._noted[config_path]

    def _note(self, config_path: str, seen: set[str]) -> None:
        source = next((s for s in self._sources() if s.is_config(config_path)), None)
        if source is None or config_path.startswith("hydra/") or config_path in seen:
            return
        seen.add(config_path)
        read = source.load_config(config_path)
        group = config_path.strip("/").rpartition("/")[0]
        package = (read.header or {}).get("package")
        # Without a header, the keys of a config in a group become those of a part of the config.
        is_root = package in ("_global_", "") if package is not None else not group
        if not is_root or not isinstance(read.config, DictConfig):
            return
        self._more_paths += OmegaConf.select(read.config, "hydra.searchpath") or []
        self._noted[config_path] = _named(read.config)
        for below in read.config.get("defaults") or ():
            if isinstance(below, str) and "@" not in below and below != "_self_":  # nothing can replace it
                self._note(below.lstrip("/") if below.startswith("/") else f"{group}/{below}".lstrip("/"), seen)

    def _sources(self) -> Iterator[ConfigSource]:
        # Asked anew for each config: Hydra and other packages add to the search path to the end.
        known = self._search_path.get_path() if self._search_path else ()
        paths = [element.path for element in known if element.provider != "hydra" and element.path]
        classes: list[Any] = Plugins.instance().discover(ConfigSource)
        sources = {source.scheme(): source for source in classes}
        # Hydra keeps the schemas behind what a config adds to the search path.
        for path in sorted([*paths, *self._more_paths], key="structured://".__eq__):
            scheme = path.partition("://")[0] if "://" in path else "file"
            if scheme in _READABLE:
                yield sources[scheme](_KEY, path if "://" in path else f"file://{path}")


class PluginSource(ConfigSource):
    """Notes the plugins of every config that Hydra is about to read; its scheme is ``stagereg-plugins://``."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self._plugins = NamedPlugins.current or NamedPlugins()

    @staticmethod
    def scheme() -> str:
        return "stagereg-plugins"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        self._plugins.note(config_path)
        return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        raise ConfigLoadError(f"{config_path!r} is not here: this source only reads what others have")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_imported": [*NamedPlugins.imported]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A launcher's worker: what follows in the same pickle may be the config of a component of one of these.
        _import_all(state.pop("_imported"), "The sweep of this job")
        self.__dict__.update(state)


def from_overrides(overrides: Iterable[str]) -> None:
    """Import the modules that ``plugins=[...]`` of a command line names; for all jobs where it is swept over.

    Raises:
        PluginError: one of them cannot be imported, or is no module.
    """
    for given in overrides:
        if given.lstrip("+").partition("=")[0] != _KEY:
            continue
        try:
            override = OverridesParser.create().parse_override(given)
        except HydraException:  # Hydra is going to report it
            continue
        swept = override.is_sweep_override()
        for value in override.sweep_iterator(lambda item: item) if swept else [override.value()]:
            _import_all(value, "The command line")


def from_config(config: Any) -> None:
    """Import the modules that ``plugins`` of a composed config names.

    Raises:
        PluginError: one of them cannot be imported, or is no module.
    """
    _import_all(_named(config), "The config")


def _named(config: Any) -> Any:
    """The value of the key, in plain lists and strings, or the reason why it has none; ``None`` without the key."""
    if not OmegaConf.is_dict(config) or _KEY not in list(config) or OmegaConf.is_missing(config, _KEY):
        return None
    try:
        value = config[_KEY]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        return f"({str(error).splitlines()[0]})"


def _import_all(value: Any, where: str) -> None:
    if value is None or isinstance(value, Mapping):  # a group of the app's own
        return
    if not isinstance(value, (list, tuple)):
        example = value if _is_name(str(value)) else "my_module"
        raise PluginError(f"{where} has {_KEY}={value}; it is a list of modules: {_KEY}=[{example}]")
    for module in value:
        _import(str(getattr(module, "text", module)), where)


def _import(module: str, where: str) -> None:
    if not _is_name(module):
        raise PluginError(
            f"{where} names the plugin {module!r}, which is no name of a module: write it as after 'import', "
            f"for instance {_KEY}: [my_package.my_module]"
        )
    try:
        registry.imported(module)
    except RegistryError as error:
        near = advice = ""
        missing = getattr(error.__cause__, "name", None) if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            near = nearest(missing, _modules_beside(missing))
            folder = os.path.abspath(sys.path[0])
            advice = f"\nModules are looked for in {folder}, on PYTHONPATH, and among the installed ones."
        raise PluginError(
            f"{where} names the plugin {module!r}, which cannot be imported.{near}\n{error}{advice}"
        ) from error
    NamedPlugins.imported[module] = None


def _is_name(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _modules_beside(module: str) -> list[str]:
    """What could have been meant instead of a module that is not there: what its package has, or all there are."""
    package = module.rpartition(".")[0]
    if not package:
        return [found.name for found in pkgutil.iter_modules()]
    folders = getattr(sys.modules.get(package), "__path__", [])
    return [package, *(found.name for found in pkgutil.iter_modules(folders, f"{package}."))]
