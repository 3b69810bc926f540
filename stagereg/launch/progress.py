"""Reads the recorded progress of a run. A launcher prints it at the end of the run, with the command that resumes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import stagereg.base.record as record
from stagereg.base.command import command_to_resume
from stagereg.base.recorded import last_event


class Progress(NamedTuple):
    """The last step and the newest checkpoints of a run, according to its event record."""

    step: int | None = None  # the last step of the attempt; `None` before the first step
    stored: dict[str, Any] | None = None  # the event of the newest checkpoint in checkpoint storage
    near: dict[str, Any] | None = None  # the event of the newest checkpoint in a tier
    resumed: dict[str, Any] | None = None  # `step` and `dir` of the stored checkpoint that the run resumed from

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint that the run has made."""
        return max((each["step"] for each in (self.stored, self.near) if each is not None), default=None)

    @classmethod
    def of(cls, directory: str, attempt: str) -> Progress:
        """Return the last step of an attempt, and the newest checkpoint of all attempts of its run."""
        newest: dict[bytes, dict[str, Any]] = {}
        paths = Path(directory).glob(record.FILES)  # after a failure of rank 0, another rank may have saved last
        for path, kind in itertools.product(paths, (b"step", b"write", b"tier", b"begin", b"restart")):
            event = last_event(path, kind, attempt if kind == b"step" else record.run_of(attempt))
            if event is not None and event["t"] >= newest.get(kind, event)["t"]:
                newest[kind] = event
        begun = newest.get(b"restart") or newest.get(b"begin", {})  # a run has one event "begin"
        own = begun.get("source") and begun["source"].rpartition("/")[0] == begun.get("dir")
        resumed = {"step": begun["restored"], "dir": begun["dir"]} if own else None
        return cls(newest.get(b"step", {}).get("step"), newest.get(b"write"), newest.get(b"tier"), resumed)

    def describe(self, skipped: str = "", printed: str = "") -> str:
        """Return a line with the newest checkpoint and the command that resumes from it; empty without a checkpoint.

        ``skipped``: a sentence, if the next start skips that checkpoint. ``printed``: the text already printed.
        """
        stored, near = self.stored or self.resumed, self.near
        if stored is None and near is None:
            return skipped and f"\n{skipped}"
        found = [] if stored is None else [f"The newest checkpoint is step {stored['step']}, in {stored['dir']}"]
        if near is not None and (stored is None or near["step"] > stored["step"]):
            found.append(f"step {near['step']} is in {near['dir']}")
        command = command_to_resume("" if stored is None else stored["dir"])
        text = "; ".join(found)
        is_known = len(found) == 1 and stored is not None and f"{stored['dir']}/step-{stored['step']:08}" in printed
        text = "" if is_known else f"{text[0].upper()}{text[1:]}. "
        return f"\n{text}{skipped or f'To resume, run {command}.'}"
