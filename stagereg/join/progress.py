"""How far a rank has come in a join, and what shows that another does not run the same program.

A forward of a sharded module gathers its parameters from all ranks, and a backward reduces gradients among them. Where
one rank runs one that the others do not, as an evaluation under ``if rank == 0``, its collectives are paired with
others of theirs: all wait for ever, or the process is aborted, or numbers are wrong. So each rank counts what it runs.
The counts of two ranks can contradict each other, whenever they are read, so it takes no time limit to know.
"""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """What one rank has run. There is a new one for each change, so another thread never reads half a change."""

    steps: int = 0  # how many have begun
    marks: int = 0  # that many steps, and training forwards and backwards of modules that gather in their forwards
    before: int = 0  # forwards that gather, until the last mark
    forwards: int = 0  # ... until now
    unreduced: int = 0  # steps before the last in which no backward reduced gradients
    reduced: bool = False  # whether one has in the last step
    waits: bool = False  # whether this rank has no more data, and waits for others to begin another step

    def begun(self, steps: int) -> Progress:
        """Step number ``steps`` has begun."""
        if steps == self.steps:
            return self
        return Progress(steps, self.marks + steps - self.steps, self.forwards, self.forwards, self._over)

    def mark(self) -> Progress:
        """A training forward, or a backward, is about to begin."""
        return self._replace(marks=self.marks + 1, before=self.forwards)

    def contradicts(self, other: Progress) -> str:
        """Return what this rank has surely run, and the other surely not, though it has come as far; or nothing."""
        if self.marks == other.marks:
            called = self.before > other.before or (other.waits and self.forwards > other.forwards)
        else:
            called = self.marks < other.marks and self.forwards > other.before
        if called:
            return (
                f"has called the model in step {self.steps} and others have not, and each call is a collective of all "
                "ranks. Call it on all of them alike, an evaluation too, and not under `if rank == 0`. Ranks that have "
                "left a plain loop call it in training steps alone: use join.iterate, or evaluate after the loop"
            )
        # Of the steps that are over here and have begun there: how many were unreduced, here at least, there at most.
        over = self.steps if self.waits else self.steps - 1
        least = (self._over if self.waits else self.unreduced) - max(0, over - other.steps)
        if least > (other._over if over >= other.steps else other.unreduced):
            return (
                f"has reduced no gradients in a step up to {other.steps} in which others did: its forward built a "
                "graph that was thrown away. Run a backward for each training forward: output.sum() * 0, if a batch "
                "has no loss. Run other forwards under torch.no_grad(), and decide about no_sync() by the number of "
                "the step"
            )
        return ""

    @property
    def _over(self) -> int:
        return self.unreduced + (self.steps > 0 and not self.reduced)
