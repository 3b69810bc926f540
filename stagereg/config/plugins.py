"""Imports the modules that a config lists in ``plugins: [my_module]``, before Hydra composes options from them.

For each config, Hydra queries all sources on the search path. The first source calls :func:`note`. This function
reads ``plugins`` from the configs that become part of the root: the primary config, its defaults, and configs with
``# @package _global_``. The modules are imported when Hydra looks up the first option of a registered kind. Hydra reads
a defaults list from its end, so a config with ``plugins`` may come after the option that needs its modules.
:func:`from_overrides` reads ``plugins`` on the command line. Configs in ``hydra.searchpath`` are not read.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import stagereg.registry as registry
from stagereg.errors import ConfigError, RegistryError, nearest

_KEY = "plugins"
NAMED = "To use a component of your own, name its module in the config: plugins: [my_module]."
"""Advice for a component that is not found."""
_READABLE = ("file", "pkg", "structured")
"""Schemes of the sources that are read for plugins: Hydra's own, without side effects and without network access."""

noted: dict[str, Any] = {}
"""The ``plugins`` of an app's configs, by config path. Global, since Hydra constructs its sources without arguments."""


class PluginError(ConfigError, ConfigCompositionException):
    """An item of ``plugins`` cannot be imported, or is not the name of a module."""


def import_noted() -> None:
    """Import the modules that :func:`note` has found. Raises ``PluginError`` if a module cannot be imported."""
    for config_path in list(noted):
        _import_all(noted.pop(config_path), f"The config {config_path.removesuffix('.yaml')!r}")


def note(config_path: str) -> None:
    """Read ``plugins`` from the config at ``config_path``, if the config exists. Raises the errors of reading it."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    source = next((s for s in sources if s.scheme() in _READABLE and s.is_config(config_path)), None)
    if source is None or config_path.startswith("hydra/") or config_path in noted:
        return
    read = source.load_config(config_path)
    group = config_path.strip("/").rpartition("/")[0]
    package = (read.header or {}).get("package")
    # Without a header, Hydra merges a config of a group under the key of the group.
    is_root = package in ("_global_", "") if package is not None else not group
    if is_root and isinstance(read.config, DictConfig):
        noted[config_path] = _named(read.config)
        for below in read.config.get("defaults") or ():
            if isinstance(below, str) and "@" not in below and below != "_self_":  # overrides cannot replace this entry
                note(below.lstrip("/") if below.startswith("/") else f"{group}/{below}".lstrip("/"))


def from_overrides(overrides: Iterable[str]) -> None:
    """Import the modules in ``plugins=[...]`` on a command line. In a sweep, import the modules of all jobs."""
    for given in overrides:
        if given.lstrip("+").partition("=")[0] != _KEY:
            continue
        try:
            override = OverridesParser.create().parse_override(given)
        except HydraException:  # Hydra reports it later
            continue
        swept = override.is_sweep_override()
        for value in override.sweep_iterator(lambda item: item) if swept else [override.value()]:
            _import_all(value, "The command line")


def from_config(config: Any, where: str = "The config") -> None:
    """Import the modules that a composed config lists in ``plugins``. ``where``: the config's name, for messages."""
    _import_all(_named(config), where)


def _named(config: Any) -> Any:
    """Return ``plugins`` from a config, ``None`` if it is missing, or an error message if it cannot be resolved."""
    try:
        value = OmegaConf.select(config, _KEY)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        return f"({str(error).splitlines()[0]})"


def _import_all(value: Any, where: str) -> None:
    if value is None or isinstance(value, Mapping):  # the app has its own config group ``plugins``
        return
    if not isinstance(value, (list, tuple)):
        raise PluginError(f"{where} has {_KEY}={value}, but {_KEY} must be a list of modules: {_KEY}=[my_module]")
    for item in value:
        module = str(getattr(item, "text", item))  # a quoted string of an override has ``text``
        try:
            registry.imported(module)
        except RegistryError as error:
            message = f"{where} names the plugin {module!r}, which cannot be imported."
            if not (isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == module):
                raise PluginError(f"{message}\n{error}") from error
            near = nearest(module, {found.name for found in pkgutil.iter_modules()} - sys.stdlib_module_names)
            places = "Python searches the directory of the script, PYTHONPATH, and installed packages."
            raise PluginError(f"{message}{near} {places}") from None
