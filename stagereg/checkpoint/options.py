"""The groups of options of a checkpointer, and checks of their values, which raise ``ConfigError``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from stagereg.base.option_text import option
from stagereg.base.providers import has, needs
from stagereg.base.spec import check
from stagereg.checkpoint.extension import EXTENSIONS
from stagereg.checkpoint.load.choosing import RESUME
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.keep import GuardedRule, Keep, KeepRule
from stagereg.checkpoint.targets import Schedule
from stagereg.errors import ConfigError, RegistryError, at_least, one_of
from stagereg.registry import build


@dataclass(frozen=True)
class Restore:
    """How :meth:`.Checkpointer.restore` chooses and reads a checkpoint.

    Args:
        verify: the check before loading: ``"full"`` reads the content of every file, ``"fast"`` only the manifest and
            the file sizes.
        read: ``"each"``: every rank reads the data that it needs, after the ranks of each machine have checked the
            files together. ``"once"``: one rank reads and checks each byte, and sends it to the ranks that need it, so
            objects may have changed before corruption is found. ``"auto"``: ``"once"`` for URLs and network file
            systems if there are several ranks, otherwise ``"each"``.
        max_crashes: after this number of crashes between the restore of a checkpoint and the next complete checkpoint,
            ``resume="auto"`` skips the restored checkpoint. A crash is a process that was killed by a signal or for
            lack of memory, or an exception that was raised again after a restart by a launcher or a scheduler. Crashes
            are counted for the directory and for the local tier. After five times as many crashes in a row, no further
            checkpoint is tried. ``None`` disables the count.
        cast: whether to convert saved floating-point tensors to the dtypes of the live tensors, as ``copy_`` does. This
            is necessary for a stager that saves smaller dtypes. If False, modules reject tensors of another dtype.
        exact: whether ``resume="auto"`` skips emergency saves. An emergency save lacks values of a failed rank, such as
            the state of its random number generators. The run then repeats the steps since the newest exact checkpoint.
            Other values of ``resume`` reject emergency saves. If ``exact`` is False, a run resumes from an emergency
            save, and seeds the generators of the failed rank from the checkpoint, the step and the rank.
        rename: a mapping from saved names to new names in the program. ``{"a": "inp"}`` restores ``inp.weight`` and its
            optimizer state from ``a.weight``. A name may be an entry, or a parameter or layer of any module, and
            includes all names below it; ``{"model.a": "model.inp"}`` applies to one module only. A checkpoint that
            already has the new name is not affected, so the option may remain in the command.
        allow_missing: names of entries, parameters and layers that keep their current values if the checkpoint does not
            contain them, for example ``["scheduler", "c.*"]``. ``*`` matches any string. These parameters start without
            optimizer state. Missing names that are not listed raise an error, and so does the state of another type of
            optimizer.

    Raises:
        ConfigError: a value is invalid.
    """

    verify: Literal["full", "fast"] = "full"
    read: Literal["auto", "each", "once"] = "auto"
    max_crashes: int | None = 3
    cast: bool = False
    exact: bool = False
    rename: Mapping[str, Any] = field(default_factory=dict)
    allow_missing: Sequence[str] = ()

    def __post_init__(self) -> None:
        one_of(option("checkpoint.restore.verify"), self.verify, ("full", "fast"))
        one_of(option("checkpoint.restore.read"), self.read, ("auto", "each", "once"))
        if self.read == "once" and not has("buckets"):
            raise ConfigError(f"{option('checkpoint.restore.read', 'once')} {needs('buckets')}")
        if self.max_crashes is not None:
            at_least(1, option("checkpoint.restore.max_crashes"), self.max_crashes)
        expect_flag("restore.cast", self.cast)
        expect_flag("restore.exact", self.exact)
        if isinstance(self.allow_missing, str) or not all(isinstance(each, str) for each in self.allow_missing):
            name = option("checkpoint.restore.allow_missing")
            raise ConfigError(f"{name} must be a list of names of the state, not {self.allow_missing!r}.")
        object.__setattr__(self, "allow_missing", tuple(self.allow_missing))
        renames = dict(_renames(self.rename))
        for new, other in ((new, other) for old, new in renames.items() for other in renames if other != old):
            if f"{new}.".startswith(f"{other}.") or f"{other}.".startswith(f"{new}."):
                raise ConfigError(
                    f"{option('checkpoint.restore.rename')}: {new!r} is a new name, and {other!r} an old one, so a run "
                    "that resumes again cannot determine which of them a checkpoint has. Rename one of them, let the "
                    "run save a checkpoint, and rename the other one in the next run."
                )
        object.__setattr__(self, "rename", renames)


def _renames(given: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the pairs of old and new names. A dotted name from a command line may arrive as a nested mapping."""
    if not isinstance(given, Mapping):
        name = option("checkpoint.restore.rename")
        raise ConfigError(f"{name} must be a mapping from saved names to new names, not {given!r}.")
    for old, new in given.items():
        name = f"{before}{old}"
        if isinstance(new, Mapping):
            yield from _renames(new, f"{name}.")
        elif isinstance(new, str) and new and name:
            yield name, new
        else:
            raise ConfigError(f"{option('checkpoint.restore.rename')}: the new name of {name!r} cannot be {new!r}.")


@dataclass(frozen=True)
class Failure:
    """Timeouts, and the reaction to failed saves.

    Args:
        on_error: the reaction to a failed save: ``"raise"`` an error in the next call, or ``"warn"`` in the log and
            continue training. With ``"warn"`` the process exits with code 1 if the last save has failed.
        timeout: the limit for one save, from the end of the previous save to the commit. A save that takes longer has
            failed, and the next save does not begin before it ends. If ``stage`` has not returned within the limit, the
            process exits. The limit also applies at the start of a run if the storage does not respond.
        mtbf: for ``every="auto"``, the expected mean time between failures of the whole job, on all machines. It is
            weighted like one recorded failure, in addition to the recorded failures of the run.

    Raises:
        ConfigError: a value is invalid.
    """

    on_error: Literal["raise", "warn"] = "raise"
    timeout: datetime.timedelta = datetime.timedelta(minutes=30)
    mtbf: datetime.timedelta = datetime.timedelta(hours=6)

    def __post_init__(self) -> None:
        one_of(option("checkpoint.failure.on_error"), self.on_error, ("raise", "warn"))
        expect_duration("failure.timeout", self.timeout)
        expect_duration("failure.mtbf", self.mtbf)


_GROUPS: Mapping[str, Any] = {"restore": Restore, "failure": Failure}


def check_all(given: Mapping[str, Any], more_groups: Mapping[str, Any] = _GROUPS) -> None:
    """Check the values of options of a checkpointer; ``given`` maps names of options to values."""
    groups = {**_GROUPS, **more_groups}
    for name, value in given.items():
        of_config = isinstance(value, Mapping) and not isinstance(value, dict)
        if (name in groups and of_config) or (name == "keep" and isinstance(value, Mapping)):
            raise ConfigError(
                f"checkpoint.{name} is a mapping, not an object. Build the "
                "checkpointer with stagereg.instantiate(cfg.checkpoint)"
                + (", or give stagereg.Keep(newest=...)." if name == "keep" else ".")
            )
        if name == "dir":
            at_directory(value)
        elif name == "save_last":
            expect_flag(name, value)
        elif name == "resume":
            _resumable(value, given.get("dir", ""))
        elif name == "every" and isinstance(value, str):
            one_of(option("checkpoint.every"), value, ("auto", "a number of steps"))
            at_least(1, option("checkpoint.every"), 1 if value == "auto" else value)
        elif name == "keep" and isinstance(value, KeepRule):
            Keep.of(value)
        elif name in ("every", "keep") and not isinstance(value, Schedule):
            at_least(1, option(f"checkpoint.{name}"), value)
        elif (group := groups.get(name)) and not isinstance(value, group):
            parts = "=..., ".join(field.name for field in fields(group))
            text = f"{option(f'checkpoint.{name}')} must be stagereg.{group.__name__}({parts}=...), not {value!r}."
            raise ConfigError(text)


def at_directory(given: object) -> None:
    """Check that a value is the path or URL of a directory."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ConfigError(f"{option('checkpoint.dir')} must be the path or URL of a directory, not {given!r}.")
    for each in (Path(given), *Path(given).parents):
        if os.path.isfile(each):
            named = option("checkpoint.dir", os.fspath(given))
            raise ConfigError(f"{named} must be the path or URL of a directory, but {each} is a file.")


def _resumable(given: object, dir: str | os.PathLike[str]) -> None:
    choices = (*RESUME, "the path of a checkpoint")
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{option('checkpoint.resume')} must be one of {', '.join(choices)}, not {given!r}.")
    if given.isidentifier() and not any(map(os.path.exists, (given, os.path.join(dir, given)))):
        one_of(option("checkpoint.resume"), given, choices)


def expect_duration(name: str, given: object) -> None:
    if not isinstance(given, datetime.timedelta) or given <= datetime.timedelta(0):
        such = "such as datetime.timedelta(hours=6)"
        raise ConfigError(f"{option(f'checkpoint.{name}')} must be a duration above 0, {such}, not {given!r}.")


def expect_flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ConfigError(f"{option(f'checkpoint.{name}')} must be true or false, not {given!r}.")


def compared(**given: Any) -> dict[str, Any]:
    """Convert options to the form that ranks compare: each field of an option group becomes a separate option."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        value = value.name if isinstance(value, GuardedRule) else value
        parts = {f"{name}.{key}": x for key, x in vars(value).items()} if is_dataclass(value) else {}
        found |= {name: type(value).__name__, **parts} if parts else {name: value}
    return found


def expect_alike(group: RankGroup, own: Mapping[str, Any]) -> None:
    """Check that the options in ``own`` are the same on all ranks. Collective."""
    ranks = group.run_on_all("The ranks could not compare their options", lambda: own)
    for name in dict.fromkeys(name for each in ranks for name in each):  # includes options of extensions
        first, *_ = values = [each.get(name) for each in ranks]
        for rank, other in enumerate(values):
            if other != first:
                has = f"{group.name(0)} has {first}, {group.name(rank)} has {other}"
                if name == EXTENSIONS:
                    raise ConfigError(
                        f"The extensions of the checkpointer are not the same on all ranks: {has}. Use the same "
                        "extensions in the same order, and install the same version of stagereg on all machines."
                    )
                how = (
                    f"Give all ranks the same path: {option('checkpoint.dir', 'PATH')}. A path with the time "
                    "(${now:...}) is the same on all ranks only under stagereg.main"
                    if name == "dir"
                    else f"Give all ranks the same {option(f'checkpoint.{name}')}"
                )
                named = option(f"checkpoint.{name}")
                raise ConfigError(f"{named} is not the same on all ranks: {has}. {how}.")


def component(kind: str, given: Any, usual: str) -> Any:
    """Return ``given`` if it is a component. If it is a name, or ``None`` for ``usual``, build that component."""
    if given is None or isinstance(given, str):
        return build(kind, usual if given is None else given)
    try:
        if isinstance(given, type):
            raise RegistryError("it is a class. Pass an instance of it")
        check(kind, type(given).__name__, given)
    except RegistryError as error:
        such = f"a {kind} or the name of one, such as {usual!r}"
        raise ConfigError(f"{kind} must be {such}, not {given!r:.100}: {error}") from None
    return given
