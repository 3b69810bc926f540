"""However parameters were distributed over ranks, before and now, each state is found once and unchanged."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.zero_shards as zero_shards


@st.composite
def deals(draw: st.DrawFn) -> tuple[list[int], dict[int, dict[str, int]], dict[str, dict[str, Any]]]:
    """Sizes of groups, the state of every parameter (some have none), and the shards of some ranks."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    total, ranks = sum(sizes), draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=total, max_size=total))
    state = {number: {"step": number} if draw(st.booleans()) else {} for number in range(total)}
    shards = {}
    for rank in range(ranks):
        own = [number for number in range(total) if owners[number] == rank]
        groups, begin = [], 0
        for size in sizes:
            groups.append({"lr": rank, "params": [number for number in own if begin <= number < begin + size]})
            begin += size
        shards[f"x.rank{rank}"] = {
            "state": {number: state[number] for number in own},
            "param_groups": groups,
            "group_sizes": sizes,
        }
    return sizes, state, shards


@settings(max_examples=60)
@given(deals(), st.data())
def test_the_state_of_a_rank_is_put_together_from_any_shards(deal: Any, data: st.DataObject) -> None:
    sizes, state, shards = deal
    wanted = data.draw(st.sets(st.sampled_from(sorted(state)))) if state else set()
    lost = data.draw(st.sampled_from([None, *sorted(shards)[1:]]))
    gone = set() if lost is None else shards[lost]["state"].keys()
    whole, missing = zero_shards.whole([shards[name] for name in shards if name != lost], wanted)
    assert missing == wanted & gone
    assert whole["state"] == {number: state[number] for number in sorted(wanted - gone) if state[number]}
    assert list(whole["state"]) == sorted(whole["state"])
    assert [len(group["params"]) for group in whole["param_groups"]] == sizes
    assert [number for group in whole["param_groups"] for number in group["params"]] == list(range(sum(sizes)))
    assert {group["lr"] for group in whole["param_groups"]} == {0}
