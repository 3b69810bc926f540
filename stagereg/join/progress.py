"""The progress of a rank in a join, and the check that two ranks run the same program.

A forward of a sharded module gathers its parameters from all ranks, and a backward reduces gradients among them. If one
rank runs a collective that the others do not, such as an evaluation under ``if rank == 0``, the other ranks pair it
with a different collective: ranks hang, the process is aborted, or results are wrong. So each rank counts its
collectives. If the counts of two ranks contradict each other, the programs differ; no time limit is needed.
"""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """The counts of one rank. Immutable: a change makes a new instance, so no thread reads a partial update."""

    steps: int = 0  # number of steps that have begun
    marks: int = 0  # number of steps, and of training forwards and backwards of gathering modules
    before: int = 0  # number of gathering forwards (forwards that gather parameters) before the last mark
    forwards: int = 0  # number of gathering forwards so far
    unreduced: int = 0  # number of steps, except the last, in which no backward reduced gradients
    reduced: bool = False  # whether a backward has reduced gradients in the last step
    waits: bool = False  # whether this rank has no more data and waits for the next step of other ranks

    def begun(self, steps: int) -> Progress:
        """Return the progress after the step with number ``steps`` has begun."""
        if steps == self.steps:
            return self
        return Progress(steps, self.marks + steps - self.steps, self.forwards, self.forwards, self._over)

    def mark(self) -> Progress:
        """Return the progress before a training forward or a backward."""
        return self._replace(marks=self.marks + 1, before=self.forwards)

    def contradicts(self, other: Progress) -> str:
        """Return a message about a call that this rank has made and ``other`` has certainly skipped, or ``""``."""
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
        # Compare the minimum number of unreduced steps on this rank with the maximum on the other rank.
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
