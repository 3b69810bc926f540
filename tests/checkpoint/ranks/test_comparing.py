"""What ranks have under one name is alike only if shape, dtype and bytes are."""

from __future__ import annotations

import pytest
import torch

from stagereg.checkpoint.ranks.comparing import compare, content_digests, contents, expect_alike
from stagereg.errors import DisagreementError

ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (ZEROS.int(), r"int32 \[4\], not float32 \[4\]"),
        (torch.zeros(2), r"float32 \[2\], not float32 \[4\]"),
        (ZEROS + 1, "other values"),
    ],
)
def test_what_differs_in_dtype_shape_or_bytes_is_refused(other: torch.Tensor, kind: str) -> None:
    ranks = [contents({"model": {"weight": x}}, (), ()) for x in (ZEROS, other)]
    told = compare([content_digests(each) for each in ranks], [{}, {}])
    assert all(one.differing for one in told), "by digests alone, before anything else is sent"
    tables = {
        rank: [each[kind] for kind in one.differing] for rank, (each, one) in enumerate(zip(ranks, told, strict=True))
    }
    with pytest.raises(DisagreementError, match=rf"'model.weight' is not the same on ranks 0, 1 \({kind}\)"):
        expect_alike(tables)
