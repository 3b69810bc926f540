"""Progress of a rank in a join, and contradictions that show that two ranks do not run the same program.

A forward of a sharded module gathers its parameters from all ranks, and a backward reduces gradients among them. If one
rank runs a collective that the others do not, such as an evaluation under ``if rank == 0``, it is paired with different
collectives of the others: ranks hang, the process is aborted, or results are wrong. So each rank counts what it runs.
If the counts of two ranks contradict each other at any time, the programs differ; no time limit is needed.
"""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """Counts of one rank. Immutable: every change makes a new instance, so other threads never read partial updates."""

    steps: int = 0  # steps that have begun
    marks: int = 0  # steps, plus training forwards and backwards of modules that gather in their forwards
    before: int = 0  # gathering forwards until the last mark
    forwards: int = 0  # gathering forwards until now
    unreduced: int = 0  # steps before the last without a backward that reduced gradients
    reduced: bool = False  # whether a backward reduced gradients in the last step
    waits: bool = False  # whether this rank has no more data, and waits for others to begin another step

    def begun(self, steps: int) -> Progress:
        """Return the progress after step number ``steps`` has begun."""
        if steps == self.steps:
            return self
        return Progress(steps, self.marks + steps - self.steps, self.forwards, self.forwards, self._over)

    def mark(self) -> Progress:
        """Return the progress before a training forward or a backward."""
        return self._replace(marks=self.marks + 1, before=self.forwards)

    def contradicts(self, other: Progress) -> str:
        """Return a text on a call that this rank has certainly made and ``other`` has skipped; otherwise ``""``."""
        if self.marks == other.marks:
            called = self.before > other.before or (other.waits and self.forwards > other.forwards)
        else:
            called = self.marks < other.marks and self.forwards > other.before
        if called:
            return (
                f"called the model in step {self.steps} and other ranks did not, but each call is a collective of all "
                "ranks. Call the model on all ranks, also for evaluation, not under `if rank == 0`. Ranks that have "
                "left a plain loop call the model only in training steps: use join.iterate, or evaluate after the loop"
            )
        # Of the steps that ended here and began there: the minimum number of unreduced steps here, the maximum there.
        over = self.steps if self.waits else self.steps - 1
        least = (self._over if self.waits else self.unreduced) - max(0, over - other.steps)
        if least > (other._over if over >= other.steps else other.unreduced):
            return (
                f"reduced no gradients in a step up to {other.steps} in which other ranks did: its forward built a "
                "graph without a backward. Run a backward for each training forward; if a batch has no loss, run it on "
                "output.sum() * 0. Run other forwards under torch.no_grad(), and choose no_sync() by the step number"
            )
        return ""

    @property
    def _over(self) -> int:
        return self.unreduced + (self.steps > 0 and not self.reduced)
