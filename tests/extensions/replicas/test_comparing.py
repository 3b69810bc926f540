"""Values that have one name on several ranks, and differ, are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from stagereg.errors import RankMismatchError
from stagereg.extensions.replicas.comparing import compare, content_digests, contents, expect_alike
from stagereg.testing.ranks import run_ranks
from tests.checkpoint.promises.test_split_tensors import ROWS, WHOLE, part_of
from tests.checkpoint.promises.test_subclasses import Rounded
from tests.checkpoint.state.test_optimizer_carries import Odd, error_of
from tests.support.subclasses import Dense, codes

pytestmark = pytest.mark.filterwarnings("ignore")


def differing(rank: int, world_size: int, root: str) -> dict[str, str]:
    """Save states that differ between ranks; return by the name that differs how the save failed."""
    mirrored = DTensor.from_local(
        codes(4, first=rank), init_device_mesh("cpu", (world_size,)), [Replicate()], run_check=False
    )
    model = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    one, own = Odd(model.parameters()), Odd(model.parameters())
    one.state[model.weight] = {"tensor": torch.tensor(float(rank))}
    own.state["global"] = {"tensor": torch.tensor(float(rank))}
    states: dict[str, dict[str, Any]] = {
        "plain": {"plain": torch.full((4,), float(rank))},
        "subclass.w": {"subclass": {"w": codes(4, first=rank)}},
        "model.weight": {"model": Rounded(codes(4, first=rank))},
        "mirrored.w": {"mirrored": {"w": mirrored}},
        "strided.w": {"strided": {"w": torch.full((3,), float(rank)).as_subclass(Dense)}},
        "part.w": {"part": {"w": part_of(WHOLE + rank, [range(ROWS)])}},
        "one.state.weight.tensor": {"model": model, "one": one},
        "own.optimizers.weight.state.global.tensor": {"model": model, "own": own},
    }
    return {name: error_of(f"{root}/{name}", **state) for name, state in states.items()}


def test_values_of_one_name_that_differ_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(differing, 2, args=(str(tmp_path),), timeout_s=100):
        assert {name for name, text in told.items() if f"{name!r} is not the same on ranks 0, 1" not in text} == set()


ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (ZEROS.int(), r"int32 \[4\], not float32 \[4\]"),
        (torch.zeros(2), r"float32 \[2\], not float32 \[4\]"),
        (ZEROS + 1, "the values differ"),
    ],
)
def test_what_differs_in_dtype_shape_or_bytes_is_refused(other: torch.Tensor, kind: str) -> None:
    ranks = [contents({"model": {"weight": x}}, (), ()) for x in (ZEROS, other)]
    told = compare([content_digests(each) for each in ranks], [{}, {}])
    assert all(one.differing for one in told), "by digests alone, before anything else is sent"
    tables = {
        rank: [each[kind] for kind in one.differing] for rank, (each, one) in enumerate(zip(ranks, told, strict=True))
    }
    with pytest.raises(RankMismatchError, match=rf"'model.weight' is not the same on ranks 0, 1 \({kind}\)"):
        expect_alike(tables)
