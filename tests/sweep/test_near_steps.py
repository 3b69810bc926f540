"""Where the copies of each step in the tier are, and how long they took, from what the ranks have recorded."""

from __future__ import annotations

from pathlib import Path

from stagereg.sweep.figures import saved
from stagereg.sweep.near_steps import near_saved, sources
from stagereg.sweep.run import RankRecord, Run, Span, Transfer


def run_of(*ranks: RankRecord) -> Run:
    return Run(Path("run"), ranks)


def sent(step: int, part: int, machine: str, start: float, error: str = "") -> Transfer:
    return Transfer(Span(step, start, 1.0, 100), part, machine, error)


def test_a_step_is_copied_once_each_part_is() -> None:
    one = RankRecord(0, tier_writes=(Span(10, 1.0, 0.5, 100),), transfers=(sent(10, 0, "b", 2), sent(10, 0, "c", 4)))
    two = RankRecord(1, tier_writes=(Span(10, 1.2, 0.7, 50),))
    [step] = near_saved(run_of(one, two))
    assert (step.state, step.machines, step.nbytes, step.start) == ("written", ("b", "c"), 150, 1.0)
    assert (step.write_s, step.copy_s) == (0.7, 3.0)
    two = RankRecord(1, tier_writes=two.tier_writes, transfers=(sent(10, 1, "a", 2),))
    [step] = near_saved(run_of(one, two))
    assert (step.state, step.machines, step.error) == ("copied", ("a", "b", "c"), "")


def test_a_copy_that_failed_is_told_unless_another_was_made() -> None:
    failed = sent(10, 0, "b", 2, "it is gone")
    [step] = near_saved(run_of(RankRecord(0, tier_writes=(Span(10, 1, 1),), transfers=(failed,))))
    assert (step.state, step.machines, step.error) == ("written", (), "b: it is gone")
    both = (failed, sent(10, 0, "c", 3))
    [step] = near_saved(run_of(RankRecord(0, tier_writes=(Span(10, 1, 1),), transfers=both)))
    assert (step.state, step.machines, step.error) == ("copied", ("c",), "")


def test_a_lost_save_and_copies_of_the_run_before_are_steps_too() -> None:
    record = RankRecord(0, tier_lost=((20, "memory is full"),), transfers=(sent(10, 3, "b", 2),))
    lost, again = near_saved(run_of(record))
    assert (lost.step, lost.state, lost.error, lost.write_s) == (20, "lost", "memory is full", None)
    assert (again.step, again.state, again.write_s, again.copy_s) == (10, "copied", None, 1.0)


def test_of_a_step_saved_twice_the_last_save_counts() -> None:
    [step] = near_saved(run_of(RankRecord(0, tier_writes=(Span(10, 1, 1, 100), Span(10, 5, 2, 100)))))
    assert (step.nbytes, step.write_s) == (100, 2)


def test_what_went_to_the_tier_alone_is_no_checkpoint_of_the_store() -> None:
    near, both = Span(10, 1, 0.1, 5, near=True), Span(20, 3, 0.2, 5)
    stalls = {"stalls": (near, both), "stages": (near, both), "writes": (Span(20, 4, 1, 5),)}
    run = run_of(RankRecord(0, **stalls, tier_writes=(Span(10, 2, 1), Span(20, 4, 1))))
    assert [(each.step, each.state) for each in saved(run)] == [(20, "complete")]
    assert [(each.step, each.stall_s) for each in near_saved(run)] == [(10, 0.1), (20, None)]


def test_the_sources_of_a_restore_are_those_of_all_ranks() -> None:
    assert sources(run_of(RankRecord(0))) is None
    one = RankRecord(0, restored=((5, {"a": 1}), (9, {"a": 5, "b": 1})))
    assert sources(run_of(one, RankRecord(1, restored=((9, {"b": 7}),)))) == (9, {"b": 8, "a": 5})
