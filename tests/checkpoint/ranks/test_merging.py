"""Rank 0 asks for the structures that it does not have from the previous save, and puts them together."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from stagereg.checkpoint.format.encoding import Encoded, encode
from stagereg.checkpoint.ranks.merging import EntryMerger, RankEntries, digest, groups_in
from stagereg.errors import CheckpointError

OPTIONS = {"betas": (0.9, 0.95), "fused": True, "params": [f"stages.0.{i}.weight" for i in range(50)]}


def optimizer(lr: float, **more: Any) -> dict[str, Any]:
    """Two groups, with long lists of names after what a schedule changes."""
    groups = {name: {"lr": lr * number, **OPTIONS, **more} for number, name in ((1, "decay"), (2, 'no, "decay"'))}
    return {"state": {}, "param_groups": groups}


def structures(value: Any) -> dict[str, Encoded]:
    return RankEntries({"optimizer": value}).structures


def exchanged(before: Any, after: Any, change: Any = lambda sent: sent) -> tuple[Any, str]:
    """Return what one rank has sent of a state, and the text that rank 0 makes of it."""
    own = RankEntries({"optimizer": after})
    there = {(name, digest(each)): each for name, each in structures(before).items()}
    merging = EntryMerger([own.digests()], [0], (), there)
    [asked] = merging.ask_ranks()
    sent = change({name: own.structures[name] for name in asked})
    return sent.get("optimizer"), merging.put_together([sent])["optimizer"].text


@pytest.mark.parametrize(
    "after",
    [
        optimizer(0.25),
        optimizer(0.5, more=[1, 2]),
        optimizer(0.5, fused="a, b"),
        optimizer(0.5, params=[]),
        [1],
        3,
        {"x": {}},
    ],
)
def test_whatever_has_changed_arrives_as_it_is(after: Any) -> None:
    assert exchanged(optimizer(0.5), after)[1] == encode(after, "optimizer").text


def test_what_is_as_before_is_not_asked_for() -> None:
    sent, text = exchanged(optimizer(0.5), optimizer(0.5))
    assert sent is None
    assert json.loads(text) == json.loads(encode(optimizer(0.5), "optimizer").text)


def test_an_object_in_place_of_a_tensor_is_a_change() -> None:
    assert digest(Encoded("{}", [])) != digest(Encoded("{}", ["x"]))


@pytest.mark.parametrize("groups", [torch.ones(2), (torch.ones(2), 1), 3, {}])
def test_what_only_looks_like_an_optimizer_has_no_groups(groups: Any) -> None:
    assert groups_in(structures({"state": {}, "param_groups": groups})) == {"optimizer": {}}


def test_what_does_not_make_up_the_structure_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match="The structure of 'optimizer' that rank 0 sent does not match its digest"
    ):
        exchanged(optimizer(0.5), optimizer(0.25), lambda sent: {"optimizer": Encoded("[]", [])})


def test_of_ranks_that_have_the_same_the_first_is_asked() -> None:
    every = [RankEntries({"optimizer": optimizer(lr)}).digests() for lr in (0.5, 0.25, 0.5)]
    merging = EntryMerger(every, [2, 0, 1], (), {})
    assert [sorted(each) for each in merging.ask_ranks()] == [[], ["optimizer"], ["optimizer"]]
