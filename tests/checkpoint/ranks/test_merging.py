"""What rank 0 knows of the ranks' structures from the save before, and what it makes of changes to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagereg.checkpoint.format.encoding import Encoded, encode
from stagereg.checkpoint.ranks.comparing import digest
from stagereg.checkpoint.ranks.merging import Changes, Merging, RankEntries, Sent, groups_in
from stagereg.errors import CheckpointError

OPTIONS = {"betas": (0.9, 0.95), "fused": True, "params": [f"stages.0.{i}.weight" for i in range(50)]}


def optimizer(lr: float, **more: Any) -> dict[str, Any]:
    """Two groups, with long lists of names after what a schedule changes."""
    groups = {name: {"lr": lr * number, **OPTIONS, **more} for number, name in ((1, "decay"), (2, 'no, "decay"'))}
    return {"state": {}, "param_groups": groups}


def structures(value: Any) -> dict[str, Encoded]:
    return RankEntries({"optimizer": value}, None).structures


def exchanged(before: Any, after: Any, known: Any = None, change: Any = lambda sent: sent) -> tuple[Any, str]:
    """Return what one rank has sent of a state, and the text that rank 0 makes of it."""
    old, own = structures(before), RankEntries({"optimizer": after}, None)
    there = {(name, digest(each)): each for name, each in (old if known is None else known).items()}
    merging = Merging([own.digests(old)], [0], (), there)
    [asked] = merging.ask_ranks()
    sent = change(own.structures_for(asked, old))
    return sent.get("optimizer"), merging.put_together([sent])["optimizer"].text


def test_of_a_new_rate_only_the_numbers_are_sent() -> None:
    sent, text = exchanged(optimizer(0.5), optimizer(0.25))
    assert isinstance(sent, Changes)
    assert sum(map(len, sent.parts.values())) < 200 < len(text) / 10
    assert text == encode(optimizer(0.25), "optimizer").text


@pytest.mark.parametrize(
    "after", [optimizer(0.5, more=[1, 2]), optimizer(0.5, fused="a, b"), optimizer(0.5, params=[]), [1], 3, {"x": {}}]
)
def test_whatever_has_changed_arrives_as_it_is(after: Any) -> None:
    assert exchanged(optimizer(0.5), after)[1] == encode(after, "optimizer").text


def test_another_base_than_the_rank_has_is_not_built_upon() -> None:
    sent, text = exchanged(optimizer(0.5), optimizer(0.25), known=structures(optimizer(0.75)))
    assert isinstance(sent, Encoded)
    assert text == encode(optimizer(0.25), "optimizer").text


def test_an_object_in_place_of_a_tensor_is_a_change() -> None:
    own, other = Encoded("{}", []), Encoded("{}", ["x"])
    assert Changes.between(own, other) is None
    assert digest(own) != digest(other)


@pytest.mark.parametrize("groups", [torch.ones(2), (torch.ones(2), 1), 3, {}])
def test_what_only_looks_like_an_optimizer_has_no_groups(groups: Any) -> None:
    assert groups_in(structures({"state": {}, "param_groups": groups})) == {"optimizer": {}}


@pytest.mark.parametrize("what", ["base", "parts", "whole"])
def test_what_does_not_make_up_the_structure_is_refused(what: str) -> None:
    def damage(sent: Sent) -> Sent:
        found: Any = sent["optimizer"]
        bad = {
            "base": lambda: found._replace(base=b"another"),
            "parts": lambda: found._replace(parts={**found.parts, 0: "[1"}),
            "whole": lambda: Encoded("[]", []),
        }
        return {"optimizer": bad[what]()}

    with pytest.raises(CheckpointError, match="What rank 0 sent of 'optimizer' does not match the digest"):
        exchanged(optimizer(0.5), optimizer(0.25), change=damage)
