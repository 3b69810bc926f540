"""What the folder of a tier has, seen from outside of its runs: for ``stagereg ls`` and ``stagereg verify``.

Changes nothing, takes no lock and asks no other machine. So it tells of one machine alone: which parts are here, and
which of them lie on another machine too. A step that a run deletes meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from stagereg.base.machine import boot_id
from stagereg.base.small_files import UnfitFileError, open_regular, read_small, warn_skipped
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import InaccessibleFile, damage_of, difference
from stagereg.checkpoint.format.manifest import FileDigest, step_of
from stagereg.checkpoint.store.lock import Owner, holder
from stagereg.extensions.tiers.folder import BOOT, NOTE, names_part, notes_of_part, read_part
from stagereg.extensions.tiers.inventory import Lineage, lineage_of
from stagereg.extensions.tiers.part import TOKEN, Part, PartFile


@dataclass(frozen=True)
class LocalPart:
    """What this machine has of one rank.

    Attributes:
        part: what it is; ``None`` if its manifest is damaged, and :attr:`damages` says how.
        rank: whose it is.
        copied: the machines that have acknowledged a copy.
        received: whether it is itself a copy, of a part that another machine wrote.
        time: of its manifest, seconds since the epoch; for people, nothing is decided by it.
        damages: what is wrong with files, by their names.
    """

    part: Part | None
    rank: int
    copied: tuple[str, ...]
    received: bool
    time: float
    damages: dict[str, str] = field(default_factory=dict)

    @property
    def elsewhere(self) -> bool:
        return self.received or bool(self.copied)


@dataclass(frozen=True)
class LocalStep:
    """What this machine has of one save: its folder, the parts by rank, and why it is void, if it is."""

    path: str
    parts: tuple[LocalPart, ...]
    void: str = ""

    @property
    def known(self) -> Part | None:
        """A part that can be read, which says what save it is."""
        return next((each.part for each in self.parts if each.part is not None), None)

    @property
    def step(self) -> int:
        return step_of(os.path.basename(self.path)) or 0

    @property
    def order(self) -> tuple[int, int]:
        """The greater, the later it was saved; what cannot be read comes first."""
        return (1 << 62, self.step) if self.known is None else self.known.save.order

    @property
    def nbytes(self) -> int:
        return sum(each.part.nbytes for each in self.parts if each.part is not None)

    @property
    def damages(self) -> dict[str, str]:
        return {name: what for each in self.parts for name, what in each.damages.items()}

    @property
    def state(self) -> str:
        """``corrupt``, ``unclear``, ``void``, ``unfinished``, ``copied``, or ``written``: some part is here alone."""
        if self.damages:
            return (
                "corrupt"
                if any(not isinstance(what, InaccessibleFile) for what in self.damages.values())
                else "unclear"
            )
        if self.void or not self.parts:
            return "void" if self.void else "unfinished"
        return "copied" if all(each.elsewhere for each in self.parts) else "written"


@dataclass(frozen=True)
class LocalRun:
    """What this machine has of one run, the latest step first, and who holds it now."""

    path: str
    run: str
    steps: tuple[LocalStep, ...]
    held_by: Owner | None

    @property
    def newest(self) -> LocalStep | None:
        """The latest step that a run may go on from, as far as this machine knows."""
        return next((each for each in self.steps if each.state in ("copied", "written")), None)

    @property
    def newest_copied(self) -> LocalStep | None:
        """The latest one that survives the loss of this machine."""
        return next((each for each in self.steps if each.state == "copied"), None)


def local_runs(target: str, look: Callable[[str], object] | None = None) -> list[LocalRun]:
    """Return what lies in the folder of a tier, of one run in it, or of one step of that; nothing if it is none.

    Args:
        target: as given by the user.
        look: has the content of every file read, and is called with the path of each step before.

    Raises:
        OSError: it cannot be listed.
    """
    if "://" in target or not os.path.isdir(target):
        return []
    path = os.path.realpath(target)
    if step_of(os.path.basename(path)) is not None and _is_run(os.path.dirname(path)):
        return [_run(os.path.dirname(path), [os.path.basename(path)], look)]
    if _is_run(path):
        return [_run(path, os.listdir(path), look)]
    names = sorted(os.listdir(path))
    if any(step_of(name) is not None for name in names):  # a store
        return []
    runs = [f"{path}/{name}" for name in names if _is_run(f"{path}/{name}")]
    return [_run(each, os.listdir(each), look) for each in runs]


def _is_run(path: str) -> bool:
    """Whether a folder is that of one run: it has the run's id for a name, and notes of the run or a part."""
    if not TOKEN.fullmatch(os.path.basename(path)) or not os.path.isdir(path):
        return False
    names = os.listdir(path)
    steps = [f"{path}/{name}" for name in names if step_of(name) is not None and os.path.isdir(f"{path}/{name}")]
    return NOTE in names or any(map(names_part, (name for step in steps for name in os.listdir(step))))


def _run(path: str, names: list[str], look: Callable[[str], object] | None) -> LocalRun:
    run = os.path.basename(path)
    lineage, boot = lineage_of([_note(f"{path}/{NOTE}")], run), _note(f"{path}/{BOOT}").decode(errors="replace")
    steps = []
    for name in names:
        if step_of(name) is not None and os.path.isdir(f"{path}/{name}"):
            step = _step(f"{path}/{name}", lineage, boot, look)
            if os.path.isdir(step.path):
                steps.append(step)
    return LocalRun(path, run, tuple(sorted(steps, key=lambda each: each.order, reverse=True)), holder(path))


def _note(path: str) -> bytes:
    """Return the content of a note of any user; empty if it cannot be read."""
    try:
        return read_small(path)
    except UnfitFileError as error:
        warn_skipped(path, error)
    except OSError:
        pass
    return b""


def _step(path: str, lineage: Lineage | None, boot: str, look: Callable[[str], object] | None) -> LocalStep:
    if look is not None:
        look(path)
    found = []
    with contextlib.suppress(FileNotFoundError):
        found = [_part(path, name, look is not None) for name in os.listdir(path) if names_part(name)]
    step = LocalStep(path, tuple(sorted((each for each in found if each), key=lambda each: each.rank)))
    void = ""
    if boot and boot != boot_id():
        void = "from before a reboot"
    elif step.known is not None and lineage is not None and not lineage.is_valid(step.known.save):
        void = "given up when the run went back"
    return LocalStep(path, step.parts, void)


def _part(folder: str, name: str, content: bool) -> LocalPart | None:
    """Look at a part; ``None`` if it was deleted meanwhile."""
    part, rank, damages, time = None, int(name.split("-")[1].split(".")[0]), {}, 0.0
    try:
        time = os.stat(f"{folder}/{name}").st_mtime
        part = read_part(folder, name)
    except OSError as error:
        damages[name] = damage_of(error)
    except (ValueError, TypeError) as error:
        damages[name] = f"damaged: {error}"
    for file, known in {} if part is None else part.files.items():
        if what := _damage(f"{folder}/{file}", known, content):
            damages[file] = what
    if damages and not os.path.exists(f"{folder}/{name}"):
        return None
    return LocalPart(part, rank, *notes_of_part(folder, name), time, damages)


def _damage(path: str, known: PartFile, content: bool) -> str:
    """Return what is wrong with a file; nothing if it is what was staged."""
    try:
        about = os.lstat(path)
        if not stat.S_ISREG(about.st_mode):
            return "no regular file"
        if wrong := difference(FileDigest(known.nbytes, 0), about.st_size):
            return wrong
        with open(path, "rb", opener=open_regular) as file:
            for number, expected in enumerate(known.blocks) if content else ():
                if (found := crc32(file.read(len(known.block(number))))) != expected:
                    return f"flipped bits in block {number}: its CRC-32 is {found:08x} and was {expected:08x}"
    except OSError as error:
        return damage_of(error)
    return ""
