"""Applies the options ``rename`` and ``allow_missing``: maps saved names to current names, and permits missing names.

A dotted name in an option includes all names that begin with it and a dot. ``a`` means ``a`` in every module of the
state; ``model.a`` means ``a`` only in the entry ``model``. If the new name of a rename is an entry of the state, the
rename applies to that entry.

A rename applies only if the checkpoint has nothing under the new name. So the options may stay in the command when
later checkpoints already have the new names.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from stagereg.base.option_text import option
from stagereg.errors import CheckpointError, few_of, kind_of, nearest

_MOST, _TRIED = 3, 20  # maximum renames and patterns in a message; maximum prefixes to search for them
_OF_WRAPPERS = {"module": "DataParallel and DistributedDataParallel", "_orig_mod": "torch.compile"}


class NameMap:
    """The options ``rename`` and ``allow_missing`` for the restore of one checkpoint."""

    def __init__(self, rename: Mapping[str, str], allow_missing: Sequence[str]) -> None:
        self._pairs = dict(rename)
        self._patterns = allow_missing
        self._entries: dict[str, str] = {}  # the saved name of each renamed entry
        self._moves: dict[str, list[tuple[str, str]]] = {}  # the renames (old, new) that apply, by module entry
        self._state: Collection[str] = ()  # the names of the state's entries
        self._here: Collection[str] = ()  # the names of the entries and their parameters
        self.missing: dict[str, list[str]] = {}  # for each entry, the permitted parameters that the checkpoint lacks
        self.unused: list[str] = []  # the patterns of ``allow_missing`` that match nothing on this rank

    def rename_entries(self, saved: Collection[str], here: Collection[str]) -> dict[str, str]:
        """Map the new names of entries to their saved names. Raises: ``CheckpointError`` if two new names are equal."""
        self._state = here
        pairs = [pair for pair in self._pairs.items() if any(_below(name, pair[1]) is not None for name in here)]
        found = by_new_name(_active(pairs, saved), saved)
        self._entries = {here: name for here, name in found.items() if here != name}
        return found

    def moves(self, entry: str, saved: Collection[str]) -> list[tuple[str, str]]:
        """Return the renames that apply to the parameters of a module entry, as pairs of old and new name."""
        found = self._moves[entry] = self._of_entry(entry, saved)
        return found

    def possible(self, entry: str, names: Iterable[str]) -> set[str]:
        """Return all names under which the parameters ``names`` of a module entry may have been saved."""
        pairs = [each for pair in self._pairs.items() for each in self._readings(entry, *pair)]
        found = {*names}
        for old, new in pairs:
            found |= {_join(old, rest) for name in found.copy() if (rest := _below(name, new)) is not None}
        return found

    def origins(self, entry: str, name: str, here: str, saved: Collection[str]) -> list[str]:
        """Return the names under which a parameter of an optimizer may have been saved, the most likely first.

        ``entry``: the entry of the module that has the parameter; empty if no module has it. ``name``: the name of the
        parameter in that module. ``here``: the name in the optimizer; it begins with the entry's name if two modules
        have equal parameter names. ``saved``: the parameter names in the saved optimizer.
        """
        if not entry:
            return [self._entries.get(name, name), name]
        moves = self._moves[entry] if entry in self._moves else self._of_entry(entry, saved)
        olds = [_join(old, rest) for old, new in moves if (rest := _below(name, new)) is not None]
        olds = [each for each in (*olds, name) if moved(each, moves) == name]
        before = self._entries.get(entry, entry)
        return [*(olds if here == name else ()), *(f"{before}.{each}" for each in olds)]

    def may_miss(self, *names: str) -> bool:
        """Return whether ``allow_missing`` matches an entry or parameter, which may have several ``names``."""
        return any(fnmatchcase(name, pattern) for pattern in self._patterns for name in names)

    def all_missing(self) -> list[str]:
        """Return the names in ``missing``, as ``entry.parameter``."""
        return [f"{entry}.{name}" for entry, own in self.missing.items() for name in own]

    def look(self, names: Collection[str]) -> None:
        """Set ``unused`` to the patterns that match none of ``names``, the entries and parameters of the state."""
        self.unused = [each for each in self._patterns if not any(fnmatchcase(name, each) for name in names)]
        self._here = names

    def no_such(self) -> str:
        """Return an error message about the first unused pattern."""
        names = {".".join(name.split(".")[:end]) for name in self._here for end in range(1, name.count(".") + 2)}
        close = nearest(self.unused[0].removesuffix(".*"), sorted(names))
        given = option("checkpoint.restore.allow_missing")
        return f"{given} has {self.unused[0]!r}, which matches nothing in the state.{close}"

    def explain(self, error: Exception) -> Exception:
        """Return the error. If a pattern is unused, perhaps because of a typo, its message also names the pattern."""
        if not self.unused or not isinstance(error, CheckpointError):
            return error
        return kind_of([error])(f"{str(error).rstrip('.')}. {self.no_such()}")

    def _of_entry(self, entry: str, saved: Collection[str]) -> list[tuple[str, str]]:
        found = []
        for pair in self._pairs.items():
            readings = (_active([each], saved) for each in self._readings(entry, *pair))
            found += next(filter(None, readings), [])
        return found

    def _readings(self, entry: str, old: str, new: str) -> list[tuple[str, str]]:
        """Return the pairs (old, new) that a rename may mean in an entry: first without its name, then as given."""
        inner = _below(old, entry), _below(new, entry)
        if inner[0] is None:
            inner = _below(old, self._entries.get(entry, entry)), inner[1]
        found = [inner] if None not in inner and any(inner) else []
        return found + [(old, new)] * (new not in self._state)  # type: ignore[return-value]


def _below(name: str, prefix: str) -> str | None:
    """Return the rest of a name after a dotted prefix; ``None`` if the name does not have the prefix."""
    if not prefix or name == prefix:
        return name[len(prefix) :]
    return name[len(prefix) + 1 :] if name.startswith(f"{prefix}.") else None


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def moved(name: str, moves: Sequence[tuple[str, str]]) -> str:
    """Return ``name`` after applying the rename that has the longest matching old name."""
    fits = [(old, _join(new, rest)) for old, new in moves if (rest := _below(name, old)) is not None]
    return max(fits, key=lambda each: len(each[0]))[1] if fits else name


def _active(pairs: Sequence[tuple[str, str]], saved: Collection[str]) -> list[tuple[str, str]]:
    """Return the renames whose old name is in a checkpoint, and whose new name is not."""
    found = []
    for old, new in pairs:
        is_there, is_new = (any(_below(name, each) is not None for name in saved) for each in (old, new))
        is_inner = _below(old, new) is not None  # the rename removes a level, so the outer name always exists
        if is_there and (is_inner or not is_new):
            found.append((old, new))
    return found


def by_new_name(moves: Sequence[tuple[str, str]], saved: Iterable[str]) -> dict[str, str]:
    """Map the new names to the saved names. Raises: ``CheckpointError`` if two saved names get the same new name."""
    found: dict[str, str] = {}
    for name in saved:
        here = moved(name, moves) if moves else name
        if (other := found.setdefault(here, name)) != name:
            by = option("checkpoint.restore.rename")
            raise CheckpointError(f"with {by}, its {other!r} and {name!r} would both be named {here!r}")
    return found


# -- advice in a message


def advice(
    entry: str, missing: Sequence[str], rest: Collection[str], there: Collection[str], alike: Callable[[str, str], bool]
) -> str:
    """Return a text that proposes options to restore a module with missing names; an empty text if no option fits.

    ``missing``: the names in the module of ``entry`` that were not saved. ``rest``: the saved names that the module
    does not have. ``there``: the saved names that it has. ``alike``: called with a missing and a saved name; returns
    whether their tensors have the same shape and dtype.
    """
    left, renames, new = set(rest), {}, []
    whole_module = {_before(name, missing[0]) for name in rest} - {None} if missing and not there else ()
    is_whole = any(all(_suits(old or "", "", name, left, alike) for name in missing) for old in whole_module)
    groups = {"": [*missing]} if is_whole else _groups(missing, there)
    for prefix, names in itertools.islice(groups.items(), _TRIED):
        olds = {old for name in left if (old := _before(name, _below(names[0], prefix) or "")) is not None}
        fits = [old for old in olds if all(_suits(old, prefix, name, left, alike) for name in names)]
        if fits:
            [old] = difflib.get_close_matches(prefix, sorted(fits), 1, 0)
            renames[old] = prefix
            left -= {_join(old, _below(name, prefix) or "") for name in names}
        else:
            new.append(prefix if [prefix] == names else f"{prefix}.*")
    texts = []
    if renames:
        if "" in (*renames, *renames.values()):
            renames = {_join(entry, old): _join(entry, each) for old, each in renames.items()}
        pairs = [*renames.items()]
        proposed = option("checkpoint.restore.rename", dict(pairs[:_MOST]))
        more = ", and so on" if len(pairs) > _MOST or len(groups) > _TRIED else ""
        [(old, each), *_] = pairs
        texts.append(f"If {old!r} in the checkpoint is {each!r} here, add {proposed}{more}")
        ends = {name.rpartition(".")[2] for pair in pairs for name in pair}
        texts += [f"{by} add {wrapper!r} to names" for wrapper, by in _OF_WRAPPERS.items() if wrapper in ends]
    if new and there:
        allowed = option("checkpoint.restore.allow_missing", new[:_MOST])
        texts.append(f"To begin {few_of(new, _MOST)} from scratch, add {allowed}")
    return "".join(f". {text}" for text in texts)


def _groups(missing: Sequence[str], present: Collection[str]) -> dict[str, list[str]]:
    """Group the missing names by the shortest prefix that no name in ``present`` starts with."""
    taken = {".".join(name.split(".")[:end]) for name in present for end in range(1, name.count(".") + 2)}
    groups: dict[str, list[str]] = {}
    for name in missing:
        parts = name.split(".")
        ends = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        groups.setdefault(next((each for each in ends if each not in taken), name), []).append(name)
    return groups


def _before(name: str, suffix: str) -> str | None:
    if not suffix or name == suffix:
        return "" if name == suffix else name
    return name[: -len(suffix) - 1] if name.endswith(f".{suffix}") else None


def _suits(old: str, new: str, name: str, left: Collection[str], alike: Callable[[str, str], bool]) -> bool:
    saved = _join(old, _below(name, new) or "")
    return saved in left and alike(name, saved)
