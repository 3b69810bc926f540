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


@settings(max_examples=40)
@given(deals(), st.data())
def test_the_state_of_a_rank_is_put_together_from_any_shards(deal: Any, data: st.DataObject) -> None:
    sizes, state, shards = deal
    wanted = data.draw(st.sets(st.sampled_from(sorted(state)))) if state else set()
    whole, missing = zero_shards.whole(shards.values(), wanted)
    assert not missing
    assert whole["state"] == {number: state[number] for number in sorted(wanted) if state[number]}
    assert list(whole["state"]) == sorted(whole["state"])
    assert [len(group["params"]) for group in whole["param_groups"]] == sizes
    assert [number for group in whole["param_groups"] for number in group["params"]] == list(range(sum(sizes)))
    assert {group["lr"] for group in whole["param_groups"]} == {0}


@settings(max_examples=40)
@given(deals(), st.data())
def test_a_state_in_no_shard_is_reported(deal: Any, data: st.DataObject) -> None:
    _, state, shards = deal
    lost = data.draw(st.sampled_from(sorted(shards)))
    left = {name: shard for name, shard in shards.items() if name != lost}
    if left:
        assert zero_shards.whole(left.values(), state.keys())[1] == set(shards[lost]["state"])
