"""The manifest of a checkpoint with the digests of its files, and the names of files and directories. Does no I/O.

A directory is a checkpoint if its manifest is readable, and all files in the manifest exist with the right size. Serial
numbers count commits. So the newest checkpoint is the last commit, even if the run was resumed from an older step.
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
RUN = ".run.json"  # the id of a run with a local tier, and its branches (histories between rollbacks)
NOTES = (FOLLOWED, KEPT, RESTORED, RUN, SWEEP_JOB)
LATEST = "latest"
MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"  # written by `DcpWriter` instead of a manifest
METADATA = ".metadata"  # torch's metadata
_FORMAT = 2
_STEP_NAME = re.compile(r"step-(?P<step>\d{1,19}(?!\d))(\.[0-9a-f]+)?", re.ASCII)  # a token may follow the step
_LONGEST_NAME = 255  # bytes, the limit of file systems
MOST = (1 << 63) - 1  # the greatest number in a manifest, such as a step or a size
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
        world_size: the number of ranks that wrote the checkpoint.
        serial: the number of the commit, from 1.
        files: the digests of the files, by the name inside the directory.
        storage: the name of the storage that reads the files.
        time: the time of the commit, in whole seconds since the epoch.
        metrics: the metrics that rank 0 logged before the save; not compared by ``==``, because they may be NaN.
        lost: in an emergency save, the names of missing or inexact values of each failed rank.
        command: the key of the command that saved the checkpoint (:func:`.command_key`); empty if unknown.
        dropped: the names of the optimizers' entries that ``checkpoint.keep.weights_after`` has dropped.
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
    dropped: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The total size of the files in bytes."""
        return sum(mark.bytes for mark in self.files.values())

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of commits: the serial number, greater for later commits, and then the step."""
        return self.serial, self.step

    @property
    def lacks(self) -> str:
        """A description of the missing or inexact values of failed ranks; empty in an exact checkpoint."""
        return "; ".join(f"{', '.join(names)} of rank {rank}" for rank, names in self.lost.items() if names)

    def dumps(self) -> str:
        """Return the text of ``manifest.json``, with the CRC-32 of the other fields as compact, sorted JSON."""
        data = {"format": _FORMAT, **asdict(self), "metrics": metrics_to_json(self.metrics)}
        for name in ("metrics", "lost", "command", "dropped"):
            if not data[name]:
                del data[name]
        checked = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**data, "crc32": crc32(checked)}, indent=1) + "\n"

    def expect_readable(self, path: str) -> None:
        """Raise ``CheckpointError`` if :meth:`loads` would reject the manifest; ``path`` is for the message."""
        try:
            self.loads(self.dumps())
        except ValueError as error:
            raise CheckpointError(f"{path} was not committed, since its manifest would be invalid: {error}.") from error

    @classmethod
    def loads(cls, text: str | bytes) -> Manifest:
        """Parse the text of ``manifest.json``. Raises: ``ValueError`` with the reason if it is invalid."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("the manifest is nested too deeply") from None
        if type(data) is not dict or data.get("format") != _FORMAT:
            raise ValueError(f"the file is not a manifest of format {_FORMAT}")
        storage, files = data.get("storage"), data.get("files")
        if not isinstance(storage, str) or not is_name(storage):
            raise ValueError(f"invalid name of a storage: {storage!r:.100}")
        if not isinstance(files, dict) or not all(isinstance(mark, dict) for mark in files.values()):
            raise ValueError("the manifest lists no files")
        for name in files:
            if not is_name(name) or name in (".", "..", MANIFEST) or set(name) & set("/\\"):
                raise ValueError(f"{name!r:.100} is not a plain file name")
        command = data.get("command", "")
        if not isinstance(command, str) or (command and not is_name(command)):
            raise ValueError(f"invalid key of a command: {command!r:.100}")
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
            dropped=_names("dropped", data.get("dropped", [])),
        )
        if (text.decode() if isinstance(text, bytes) else text) != manifest.dumps():
            raise ValueError("the manifest was changed after it was written: the CRC-32 or the text differs")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its path or URL, and its manifest."""

    path: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def key(self) -> str:
        """The identity of the checkpoint, independent of a token (random suffix) in its directory name."""
        return f"{plain_name(self.name)} {self.manifest.serial} {self.manifest.time}"


def step_name(step: int) -> str:
    """Return the directory name of a step. The names sort like the steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint directory from its name; ``None`` for any other name."""
    return step_within(name) if _STEP_NAME.fullmatch(name) else None


def plain_name(name: str) -> str:
    """Return a step's directory name without its token (random suffix). Other names are returned unchanged."""
    return name if step_of(name) is None else name.partition(".")[0]


def step_within(name: str) -> int | None:
    """Return the step in a name, which may be temporary or have a token (random suffix); ``None`` if it has no step."""
    found = _STEP_NAME.search(name)
    return None if found is None else int(found["step"])


def new_token() -> str:
    """Return a unique token for the temporary names of one save. Does not change the state of ``random``."""
    return uuid.uuid4().hex[:12]


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics for JSON, with NaN and infinity as strings."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def metrics_from_json(data: Any) -> dict[str, float]:
    """Undo :func:`metrics_to_json`. Raises: ``ValueError`` if ``data`` is not a mapping of names to numbers."""
    if not isinstance(data, dict) or not all(is_name(name) for name in data):
        raise ValueError("the metrics are not a mapping of names to numbers")
    for name, value in data.items():
        if value not in ("nan", "inf", "-inf") and not (type(value) is float and math.isfinite(value)):
            raise ValueError(f"the metric {name} is not a number: {value!r:.100}")
    return {name: float(value) for name, value in data.items()}


def now() -> int:
    """Return the current time in seconds, limited to the values that a manifest accepts, in case the clock is wrong."""
    return min(max(0, int(time.time())), LATEST_TIME)


def _lost(data: Any, world_size: int) -> dict[str, list[str]]:
    if not isinstance(data, dict) or not all(n is not None and n < world_size for n in map(decimal, data)):
        raise ValueError(f"the field 'lost' is not a mapping of ranks below the world size {world_size} to lists")
    return {rank: _names("lost", names) for rank, names in data.items()}


def _names(field: str, data: Any) -> list[str]:
    if not isinstance(data, list) or not all(isinstance(each, str) and is_name(each) for each in data):
        raise ValueError(f"the field {field!r} does not have a list of names")
    return data


def is_name(text: str) -> bool:
    """Return whether a string is a valid name: printable, not empty, and at most as long as a file name may be."""
    return text.isprintable() and 0 < len(text.encode()) <= _LONGEST_NAME


def _whole(data: dict[str, Any], key: str, least: int = 0, most: int = MOST) -> int:
    value = data.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} must be an integer in {least}..{most}, got {value!r:.100}")
    return value
