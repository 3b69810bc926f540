"""The names of a checkpoint's parts, its manifest, and the digests of its files. Touches no disk.

A directory without a readable manifest, or with a file missing or of another size, is not a checkpoint. Serials count
commits, so "newest" means committed last, also after a run was resumed from an older step.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stagereg.base.number_text import decimal
from stagereg.checkpoint.format.checksum import crc32
from stagereg.errors import CheckpointError

RESTORED = ".restored.json"
SWEEP_JOB = ".sweep-job.json"
KEPT = "kept.json"
FOLLOWED = "done.json"  # the record of `stagereg follow`, in its own directory
RUN = ".run.json"  # the id and the branches of a run with a tier
LATEST = "latest"
MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"  # of `DcpWriter`, whose directories have no manifest
METADATA = ".metadata"  # of torch
_FORMAT = 2
_STEP_NAME = re.compile(r"step-(?P<step>\d{1,19}(?!\d))(\.[0-9a-f]+)?", re.ASCII)  # with a token if a step has several
_LONGEST_NAME = 255  # bytes, the limit of file systems
MOST = (1 << 63) - 1  # the greatest number in a manifest, of a step as well as of bytes
LATEST_TIME = 1 << 37  # in the year 6325; every platform can convert it to a date


@dataclass(frozen=True)
class FileDigest:
    """The size of one file in bytes and the CRC-32 of its content (:mod:`.checksum`)."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint.

    Attributes:
        step: the training step.
        world_size: the number of ranks that wrote it.
        serial: its number among all commits, from 1.
        files: their digests, by the name inside the directory.
        storage: the name of the storage that reads it.
        time: of the commit, whole seconds since the epoch.
        metrics: rank 0 logged them before the save; may have NaN, so two manifests are compared without them.
        lost: in an emergency save the failed ranks, each with the values that are missing or inexact, in words.
        command: the key of the command that saved it (:func:`.command_key`); empty if it is not known.
    """

    step: int
    world_size: int
    serial: int
    files: dict[str, FileDigest]
    storage: str = "dcp"
    time: int = 0
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    lost: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        return sum(mark.bytes for mark in self.files.values())

    @property
    def order(self) -> tuple[int, int]:
        """The order of commits: greater means later; by the step if two have one serial."""
        return self.serial, self.step

    @property
    def lacks(self) -> str:
        """The values of failed ranks that are missing or inexact, in words; empty in an exact checkpoint."""
        return "; ".join(f"{', '.join(names)} of rank {rank}" for rank, names in self.lost.items() if names)

    def dumps(self) -> str:
        """Return the text of ``manifest.json``; its checksum is the CRC-32 of the JSON with sorted keys, no spaces."""
        data = {"format": _FORMAT, **asdict(self), "metrics": metrics_to_json(self.metrics)}
        for name in ("metrics", "lost", "command"):
            if not data[name]:
                del data[name]
        checked = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**data, "crc32": crc32(checked)}, indent=1) + "\n"

    def expect_readable(self, path: str) -> None:
        """Raise ``CheckpointError`` if :meth:`loads` would refuse the manifest for ``path``."""
        try:
            self.loads(self.dumps())
        except ValueError as error:
            raise CheckpointError(f"{path} was not committed, since its manifest would be refused: {error}.") from error

    @classmethod
    def loads(cls, text: str | bytes) -> Manifest:
        """Read the text of ``manifest.json``. Raises: ``ValueError`` with the reason if it is invalid."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply to be a manifest") from None
        if type(data) is not dict or data.get("format") != _FORMAT:
            raise ValueError(f"it is not a manifest of format {_FORMAT}")
        storage, files = data.get("storage"), data.get("files")
        if not isinstance(storage, str) or not is_name(storage):
            raise ValueError(f"storage is {storage!r:.100}, which is not a name")
        if not isinstance(files, dict) or not all(isinstance(mark, dict) for mark in files.values()):
            raise ValueError("it lists no files")
        for name in files:
            if not is_name(name) or name in (".", "..", MANIFEST) or set(name) & set("/\\"):
                raise ValueError(f"{name!r:.100} is not a plain file name")
        command = data.get("command", "")
        if not isinstance(command, str) or (command and not is_name(command)):
            raise ValueError(f"command is {command!r:.100}, which is not a name")
        manifest = cls(
            step=_whole(data, "step"),
            world_size=_whole(data, "world_size", least=1),
            serial=_whole(data, "serial"),
            files={name: FileDigest(_whole(mark, "bytes"), _whole(mark, "crc32")) for name, mark in files.items()},
            storage=storage,
            time=_whole(data, "time", most=LATEST_TIME),
            metrics=metrics_from_json(data.get("metrics", {})),
            lost=_lost(data.get("lost", {}), _whole(data, "world_size", least=1)),
            command=command,
        )
        if (text.decode() if isinstance(text, bytes) else text) != manifest.dumps():
            raise ValueError("it is not what was written: its own CRC-32 differs, or the text")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where it is, a path or a URL, and its manifest."""

    path: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def key(self) -> str:
        """The identity of the checkpoint, whether its name has a token or not."""
        return f"{plain_name(self.name)} {self.manifest.serial} {self.manifest.time}"


def step_name(step: int) -> str:
    """Return the directory name of a step, so that names sort as steps do."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for; ``None`` for a name that is of no step."""
    return step_within(name) if _STEP_NAME.fullmatch(name) else None


def plain_name(name: str) -> str:
    """Return the name of a step's directory without the token that it may have; any other name as it is."""
    return name if step_of(name) is None else name.partition(".")[0]


def step_within(name: str) -> int | None:
    """Return the step that a name is about which has one somewhere in it, as temporary names and such with a token."""
    found = _STEP_NAME.search(name)
    return None if found is None else int(found["step"])


def new_token() -> str:
    """Return what makes the temporary names of one save unique; draws from the system, not from ``random``."""
    return uuid.uuid4().hex[:12]


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics as JSON can have them: NaN and infinity as texts."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def metrics_from_json(data: Any) -> dict[str, float]:
    """Return the metrics that :func:`metrics_to_json` made this of. Raises: ``ValueError`` if they are none."""
    if not isinstance(data, dict) or not all(is_name(name) for name in data):
        raise ValueError("its metrics are no mapping of names")
    for name, value in data.items():
        if value not in ("nan", "inf", "-inf") and not (type(value) is float and math.isfinite(value)):
            raise ValueError(f"the metric {name} is {value!r:.100}, which is no number")
    return {name: float(value) for name, value in data.items()}


def now() -> int:
    """Return the time for a manifest; of a clock that is before 1970 or far ahead, the nearest one it may have."""
    return min(max(0, int(time.time())), LATEST_TIME)


def _lost(data: Any, world_size: int) -> dict[str, list[str]]:
    if not isinstance(data, dict) or not all(isinstance(each, list) for each in data.values()):
        raise ValueError("its lost ranks are no mapping of lists")
    numbers = [decimal(rank) for rank in data]
    if None in numbers or not all(isinstance(x, str) and is_name(x) for names in data.values() for x in names):
        raise ValueError("its lost ranks are no numbers with names")
    if not all(number is not None and number < world_size for number in numbers):
        raise ValueError(f"its lost ranks are not below its world size, {world_size}")
    return data


def is_name(text: str) -> bool:
    """Whether it can be printed: no control characters, and no longer than file systems have it."""
    return text.isprintable() and 0 < len(text.encode()) <= _LONGEST_NAME


def _whole(data: dict[str, Any], key: str, least: int = 0, most: int = MOST) -> int:
    value = data.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {value!r:.100}, which is no whole number from {least} to {most}")
    return value
