"""Compares the steps of a proof with the recorded steps, and explains the first difference.

A difference refutes a checkpoint if a step after the restore has it, and if training depends on the value. The loss,
plain values, and generators that the recorded steps did not use are only reported. With the same number of ranks,
values must be equal bit for bit. With another number, ranks hold other shards: the norms of whole tensors may then
differ by 0.1 %, and all ranks together must process the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import stagereg.extensions.prove.observing as seen
from stagereg.extensions.prove.observing import OUTSIDE, TIED, Snapshot
from stagereg.extensions.prove.recording import ACCUMULATED

BOUND = 1e-3  # largest relative difference of a norm on another number of ranks
_STATE = seen.SCALE, seen.SCHEDULE, seen.GRADIENT, seen.OPTIMIZER, seen.PARAMETER, seen.BUFFER
_REST = seen.VALUE, seen.LOSS, seen.VARIABLE
_AT_START = seen.STEP, seen.RANDOM, seen.DATA, *_STATE, *_REST  # in the order in which one difference causes another
_IN_STEPS = seen.STEP, seen.DATA, seen.RANDOM, *_STATE, *_REST
_MISSING, ENDED = "missing", "the program took no such step"
Ranks = Mapping[int, Sequence[Snapshot]]
"""By rank: the generators at the save or restore, the start of the first step, and the end of each step."""


class Difference(NamedTuple):
    """One value that differs between the recorded steps and the proof."""

    row: int  # 0: before the first forward after the save; n: at the end of the n-th step
    rank: int  # -1: all ranks together
    kind: str
    name: str
    expected: Any
    found: Any
    refutes: bool


def compare(recorded: Ranks, tried: Ranks, same_size: bool) -> list[Difference]:
    """Return all differences; the one that probably caused the others comes first.

    ``same_size``: whether both runs had the same number of ranks.
    """
    found = [*_in_parts(recorded, tried)] if same_size else [*_together(recorded, tried)]
    if same_size:
        later = {each[1:4] for each in found if each.row and each.refutes}
        # A difference at the start that the first step removes, such as a buffer that DDP broadcasts, changes nothing.
        found = [each._replace(refutes=each.refutes and (each.row > 0 or each[1:4] in later)) for each in found]
    return sorted(
        found, key=lambda each: (not each.refutes, not _is_other_step(each), each.row, _order(each), each.rank)
    )


def _is_other_step(each: Difference) -> bool:
    return each.kind == seen.STEP and each.name == "step" and each.found != ENDED  # explains all other differences


def _order(each: Difference) -> tuple[bool, int]:
    return not each.name.endswith(TIED), (_IN_STEPS if each.row else _AT_START).index(each.kind)


def _in_parts(recorded: Ranks, tried: Ranks) -> Iterator[Difference]:
    for rank, (saved, *rows) in recorded.items():
        used = {
            key
            for first in (saved, rows[0])
            for key in first
            if any(row.get(key, first[key]) != first[key] for row in rows)
        }
        for at, row in enumerate(rows):
            if at + 1 >= len(tried[rank]):
                yield Difference(at, rank, seen.STEP, "step", row["step: step"], ENDED, True)
                break
            for key, value in row.items():
                kind, _, name = key.partition(": ")
                other = tried[rank][at + 1].get(key, _MISSING)
                if _bits(value) == _bits(other) or (kind == seen.DATA and name != "batches"):
                    continue
                if other == _MISSING and (not (at or tried[rank][1]) or (OUTSIDE in key)):  # not defined yet
                    continue
                decides = kind not in (seen.LOSS, seen.VARIABLE) and (kind != seen.VALUE or isinstance(value, list))
                # Other options of a scheduler outside the state may be constructed.
                decides &= kind != seen.SCHEDULE or OUTSIDE not in key or ".last_epoch" in key
                decides &= key in used or not (kind == seen.RANDOM or (kind == seen.VALUE and OUTSIDE in key))
                yield Difference(at, rank, kind, name, value, other, decides)


def _bits(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """Return the dtype and shape of a tensor in a snapshot; empty for other values."""
    return str(value[0][0]) if isinstance(value, list) and value[0] and "[" in value[0][0] else ""


def _together(recorded: Ranks, tried: Ranks) -> Iterator[Difference]:
    """Compare the samples of all ranks, and whole tensors."""
    both = recorded, tried
    last = [min(map(len, ranks.values())) for ranks in both]
    sizes = [
        [sum(rows[at].get("data: count", 0) for rows in ranks.values()) for at in range(2, end)]
        for ranks, end in zip(both, last, strict=True)
    ]
    counts = [list(accumulate(each)) for each in sizes]
    for count in sorted({*counts[0]} & {*counts[1]} - {0}):
        ours, theirs = (_samples(ranks, own.index(count) + 3) for ranks, own in zip(both, counts, strict=True))
        if ours != theirs:
            yield Difference(counts[0].index(count) + 1, -1, seen.DATA, f"first {count} samples", ours, theirs, True)
            break
    steps_match = all(a == b for a, b in zip(*sizes, strict=False))
    for at in range(1, min(last) if steps_match else 2):
        whole = [_whole([rows[at] for rows in ranks.values()]) for ranks in both]
        for key, value in whole[0].items():
            kind, _, name = key.partition(": ")
            other = whole[1].get(key)
            near = isinstance(value, float) and isinstance(other, float) and math.isclose(value, other, rel_tol=BOUND)
            if not (other is None or value == other or near or OUTSIDE in key or (kind == seen.BUFFER and at > 1)):
                yield Difference(at - 1, -1, kind, name, value, other, kind not in _REST)


def _samples(ranks: Ranks, end: int) -> str:
    parts = [part for rows in ranks.values() for row in rows[2:end] for part in row.get("data: samples", [[]])[0]]
    return f"{sum(int(part, 16) for part in parts) % (1 << 64):016x}"


def _whole(rows: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the norm of each whole tensor, and each plain value, unless ranks hold different values."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row if not key.startswith((seen.DATA, seen.RANDOM))):
        values = [row[key] for row in rows if key in row]
        if isinstance(values[0], list) and values[0][2]:
            found[key] = math.sqrt(sum(each[1] ** 2 for each in values) / values[0][2])
        elif all(_bits(each) == _bits(values[0]) for each in values):
            found[key] = values[0][1] if isinstance(values[0], list) else values[0]
    return found


_CAUSES = {
    seen.STEP: "the loop counts steps in another way after a restore. Begin at restore(state) + 1",
    seen.DATA: "position, order or content of the data differ. Save the whole sampler or loader, and seed its workers",
    seen.RANDOM: "the generator is not in the state, or is seeded or used between the restore and the first step",
    seen.SCALE: "the loss scaler is not in the state, or the program replaces it after the restore",
    seen.SCHEDULE: "the program sets this option or steps a scheduler after the restore, or no scheduler is saved",
    seen.OPTIMIZER: "the program changes or replaces the optimizer's state after the restore",
    seen.PARAMETER: "it changes after the restore, depends on a value outside the state, or differed between ranks",
    seen.BUFFER: "each rank has its own buffers, but the checkpoint has those of one rank",
    seen.GRADIENT: "the loss depends on a value that is not in the state, or on a kernel that is not repeatable",
    seen.VALUE: "the program does not restore this tensor. Save it in the state",
}


def explain(differences: Sequence[Difference], recorded: Ranks, facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the likely cause of the first difference, as a sentence; docs/prove.md explains the cures.

    ``facts``: the facts that the run and the proof recorded about themselves.
    """
    first = differences[0]
    name, expected, found = first.name.replace(OUTSIDE, ""), first.expected, first.found
    if name.endswith(TIED):
        return f"{name.removesuffix(TIED)} no longer shares memory with {expected}. Tie them after the restore."
    if found == ENDED:
        return "the program ends earlier than the run did. Start it with the same number of steps."
    if name == "optimizer steps":
        return "the accumulation of gradients begins at another batch. Derive its position from the step."
    if kind_of(expected) and kind_of(found) and kind_of(expected) != kind_of(found):
        return f"{name} has another dtype or shape than at the save: load_state_dict or the program converts it."
    if isinstance(found, list) and isinstance(expected, list) and expected[1] > found[1] == 0.0:
        return f"{name} is zero: the program does not restore it, or resets it."
    same = [
        (at, rank, key.partition(": ")[2])
        for rank, (_, *rows) in recorded.items()
        for at, row in enumerate(rows)
        for key, value in row.items()
        if key.startswith(first.kind) and _bits(value) == _bits(found)
    ]
    if first.kind == seen.DATA and same:
        ahead = same[0][0] - first.row
        far = f"{abs(ahead)} batch{'es' * (abs(ahead) > 1)} too far"
        return f"the data is {far} {'ahead: the loader had prefetched them' if ahead > 0 else 'back'} at the restore."
    here = [each for each in same if each[0] == first.row and first.kind not in (seen.STEP, seen.SCHEDULE)]
    if here:
        return f"{name} has the value that {here[0][2].replace(OUTSIDE, '')} of rank {here[0][1]} had in the run."
    if name != first.name:
        return f"{name} is not in the state. Add it to the state that is saved and restored."
    if found == _MISSING and first.kind == seen.DATA:
        return "no batch reaches the modules of the state: the program trains other modules."
    if found == _MISSING:
        return f"{name} does not exist in the resumed run: it is not restored, or it is frozen or unused there."
    if first.kind == seen.GRADIENT:
        accumulates = any(row.get("step: optimizer steps") == 0 for rows in recorded.values() for row in rows)
        lost = next((each.expected for each in differences if each.name == ACCUMULATED and each.found == 0), 0)
        if lost and accumulates:
            return f"{lost} gradients that were accumulated before the save are lost. Save after an optimizer step."
        if any(each.get("benchmark") for each in facts):
            return "torch.backends.cudnn.benchmark chooses kernels by speed. Set it to False."
    if first.kind == seen.RANDOM and name.startswith("generator of"):
        return f"the program seeds the {name}, or draws from it, after the restore, for example in iter(DataLoader)."
    return f"{_CAUSES[first.kind]}."
