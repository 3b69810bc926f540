"""``plugins: [my_module]``: modules that a config names, imported before its options are composed.

Hydra asks every source on the search path for each config that it reads. The first source calls :func:`note`, which
reads the ``plugins`` of the configs that become part of the root: the primary config, its defaults, and configs with
``# @package _global_``. The modules are imported when an option of a kind of the registry is looked up. Hydra goes
through a defaults list from its end, so a chosen config is in time after the option that needs its modules.
:func:`from_overrides` reads overrides. Configs in folders that only ``hydra.searchpath`` adds are not read.
"""

from __future__ import annotations

import contextlib
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
NAMED = "One of your own is found when the config names its module, plugins: [my_module]."
"""What to do where a component is not found."""
_READABLE = ("file", "pkg", "structured")
"""Schemes of the sources that are asked for configs: Hydra's own, which have no side effects and need no network."""

noted: dict[str, Any] = {}
"""What the configs of an app name, by path. Global, as Hydra makes the sources of its search path without arguments."""


class PluginError(ConfigError, ConfigCompositionException):
    """A config names as a plugin what cannot be imported, or what is no module."""


def note(config_path: str) -> None:
    """Read what the config at ``config_path``, if it is there, names; Hydra reports what is wrong with it."""
    with contextlib.suppress(Exception):
        _note(config_path)


def import_noted() -> None:
    """Import what was noted. Raises: ``PluginError`` if one of it cannot be imported, or is no module."""
    for config_path in list(noted):
        _import_all(noted.pop(config_path), f"The config {config_path.removesuffix('.yaml')!r}")


def _note(config_path: str) -> None:
    sources = GlobalHydra.instance().config_loader().get_sources()
    source = next((s for s in sources if s.scheme() in _READABLE and s.is_config(config_path)), None)
    if source is None or config_path.startswith("hydra/") or config_path in noted:
        return
    read = source.load_config(config_path)
    group = config_path.strip("/").rpartition("/")[0]
    package = (read.header or {}).get("package")
    # Without a header, the keys of a config in a group become those of a part of the config.
    is_root = package in ("_global_", "") if package is not None else not group
    if is_root and isinstance(read.config, DictConfig):
        noted[config_path] = _named(read.config)
        for below in read.config.get("defaults") or ():
            if isinstance(below, str) and "@" not in below and below != "_self_":  # nothing can replace it
                _note(below.lstrip("/") if below.startswith("/") else f"{group}/{below}".lstrip("/"))


def from_overrides(overrides: Iterable[str]) -> None:
    """Import the modules that ``plugins=[...]`` of a command line names; for all jobs where it is swept over."""
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


def from_config(config: Any, where: str = "The config") -> None:
    """Import the modules that ``plugins`` of a composed config, or of ``where``, names."""
    _import_all(_named(config), where)


def _named(config: Any) -> Any:
    """The value of the key, in plain lists and strings, or the reason why it has none; ``None`` without the key."""
    try:
        value = OmegaConf.select(config, _KEY)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        return f"({str(error).splitlines()[0]})"


def _import_all(value: Any, where: str) -> None:
    if value is None or isinstance(value, Mapping):  # a group of the app's own
        return
    if not isinstance(value, (list, tuple)):
        raise PluginError(f"{where} has {_KEY}={value}; it is a list of modules: {_KEY}=[my_module]")
    for item in value:
        module = str(getattr(item, "text", item))  # of an override, a quoted string
        try:
            registry.imported(module)
        except RegistryError as error:
            message = f"{where} names the plugin {module!r}, which cannot be imported."
            if not (isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == module):
                raise PluginError(f"{message}\n{error}") from error
            near = nearest(module, {found.name for found in pkgutil.iter_modules()} - sys.stdlib_module_names)
            places = "Modules are looked for beside the script, on PYTHONPATH, and among the installed ones."
            raise PluginError(f"{message}{near} {places}") from None
