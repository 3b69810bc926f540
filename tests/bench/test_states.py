"""The state dicts have the sizes that the tables name, at any scale, and change as training changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagereg.bench.states import STATES, make, tensors

MIB = 2**20


def named(tree: dict[Any, Any], above: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        dotted = f"{above}.{key}" if above else str(key)
        found |= named(value, dotted) if isinstance(value, dict) else {dotted: value}
    return found


@pytest.mark.parametrize(("name", "mib", "count"), [("large", 1024, 24), ("gpt", 886, 592), ("small", 49, 20_000)])
def test_a_state_has_its_size_and_all_of_it_changes(name: str, mib: int, count: int) -> None:
    whole = STATES[name](1.0, lambda *shape: torch.empty(*shape, device="meta"))
    assert len(tensors(whole.tree)) == count
    assert whole.nbytes / MIB == pytest.approx(mib, rel=0.01)
    state = make(name, 0.01)
    assert state.nbytes == pytest.approx(whole.nbytes * 0.01, rel=0.1)
    before = {key: x.clone() for key, x in named(state.tree).items()}
    state.change()
    for key, x in named(state.tree).items():
        assert not bool((x == before[key]).any()), key
