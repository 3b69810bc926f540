"""Which steps there are: the union of what machines have; what a branch has given up stays void."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.extensions.tiers.inventory import Lineage, ReportedPart, lineage_of, missing_copies, steps
from stagereg.extensions.tiers.part import SaveId

RUN = "0123abcd"


def save(step: int, branch: int = 1, serial: int = 0, world: int = 2, run: str = RUN) -> SaveId:
    return SaveId(run, branch, serial or step, step, f"{branch:04x}{serial or step:08x}", world)


def part(of: SaveId, rank: int, crc: int = 0) -> ReportedPart:
    return ReportedPart(of, rank, crc, ((f"__{rank}_0.distcp", FileDigest(8, rank)),))


LINEAGE = Lineage(RUN).branched(-1)


def found(reports: dict[str, list[ReportedPart]], lineage: Lineage = LINEAGE) -> list[int]:
    return [each.save.step for each in steps(reports, lineage)[0]]


def test_a_step_is_complete_if_each_part_is_on_some_machine_and_no_machine_vetoes() -> None:
    new, old = save(100), save(90)
    reports = {"a": [part(new, 0)], "b": [part(new, 1)], "back": [part(old, 0), part(old, 1)], "empty": []}
    assert found(reports) == [100, 90]
    complete, others = steps({"a": [part(new, 0)], "back": [part(old, 0), part(old, 1)]}, LINEAGE)
    assert [each.save.step for each in complete] == [90]
    assert others == ["step 100 is incomplete: no machine has the part of rank 1"]


@given(some.lists(some.sets(some.integers(0, 3)), min_size=1, max_size=4), some.lists(some.integers(1, 5), max_size=6))
def test_whoever_comes_back_with_old_steps_never_changes_the_newest(
    has: Sequence[set[int]], old: Sequence[int]
) -> None:
    new = save(10, world=4)
    reports = {f"m{n}": [part(new, rank) for rank in ranks] for n, ranks in enumerate(has)}
    alone = found(reports)
    assert alone == ([10] if set().union(*has) == {0, 1, 2, 3} else [])
    with_old = {**reports, "back": [part(save(step, world=1), 0) for step in set(old)]}
    assert found(with_old)[: len(alone)] == alone


def test_what_most_machines_report_of_a_part_counts_and_others_are_no_copies() -> None:
    new = save(5, world=1)
    [step], _ = steps({"a": [part(new, 0, 1)], "b": [part(new, 0, 2)], "c": [part(new, 0, 2)]}, LINEAGE)
    [(chosen, machines)] = step.parts
    assert (chosen.crc32, machines) == (2, ("b", "c"))
    assert step.without({("b", 0)}).parts[0][1] == ("c",)


@given(some.lists(some.tuples(some.integers(-1, 20), some.lists(some.integers(0, 20), max_size=4)), max_size=6))
def test_what_is_valid_is_what_a_history_of_the_run_has_left(branches: list[tuple[int, list[int]]]) -> None:
    """Against a model that keeps all that was saved, and deletes what each start gives up."""
    lineage, alive, every = Lineage(RUN), list[SaveId](), list[SaveId]()
    for number, (began, saved) in enumerate(branches, 1):
        lineage = lineage.branched(began)
        alive = [each for each in alive if each.step <= began]
        new = [save(step, number, serial) for serial, step in enumerate(saved, 1)]
        alive, every = alive + new, every + new
    assert [each for each in every if lineage.is_valid(each)] == alive
    assert Lineage.loads(lineage.dumps()) == lineage
    assert not any(lineage.is_valid(each._replace(run="ffffffff")) for each in every)
    assert not lineage.is_valid(save(0, lineage.branch + 1))


def test_a_rollback_makes_the_same_step_of_the_earlier_branch_void() -> None:
    lineage = LINEAGE.branched(500)
    old, new = save(600), save(600, branch=2, serial=1)
    both = [part(each, rank) for each in (old, new, save(500)) for rank in (0, 1)]
    complete, others = steps({"a": both}, lineage)
    assert [each.save for each in complete] == [new, save(500)]
    assert others == ["step 600 of branch 1 is void: the run returned to an earlier step"]


def test_a_checkpoint_of_the_store_is_of_the_branch_that_was_new_then() -> None:
    lineage = LINEAGE.branched(5, stored=3).branched(7, stored=8)
    assert [lineage.branch_of(serial) for serial in (1, 3, 4, 8, 9)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("text", [b"", b"x", b"{}", b"[]", b'{"run": "x", "branches": []}', b"[" * 100_000])
def test_what_is_no_lineage_is_refused_and_passed_over(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # each has a reason of its own
        Lineage.loads(text)
    assert lineage_of([text]) is None
    assert lineage_of([text, LINEAGE.dumps(), Lineage(RUN).dumps()]) == LINEAGE


def test_missing_copies_go_to_partners_that_have_none() -> None:
    new = save(5)
    [step], _ = steps({"a": [part(new, 0), part(new, 1)], "b": [part(new, 1)]}, LINEAGE)
    partners = {"a": ["b"], "b": ["a"]}
    assert missing_copies(step, partners, 1) == {"a": {0: ["b"]}}
    assert missing_copies(step, partners, 0) == {}
