"""The plan: what is copied, to which offset, and when a plan no longer fits."""

from __future__ import annotations

import pytest
import torch

from stagereg.errors import StagingError
from stagereg.kernel.layout import Layout, plan_layout, signature


def plan(*tensors: torch.Tensor) -> Layout:
    return plan_layout(tensors, signature(tensors))


def test_a_signature_differs_when_only_the_storage_has_shrunk() -> None:
    x = torch.ones(100)
    x.untyped_storage().resize_(200)
    x.untyped_storage().resize_(400)
    whole = signature([x])
    x.untyped_storage().resize_(200)
    assert signature([x]) != whole


def test_a_tensor_beyond_its_storage_is_refused_by_its_index() -> None:
    x = torch.ones(100)
    x.untyped_storage().resize_(396)
    with pytest.raises(StagingError, match="needs 400 bytes but its storage holds 396") as caught:
        plan(torch.ones(3), x)
    assert caught.value.path == (1,)
