"""Everything that was saved is loaded into the objects; what cannot be loaded is named in a short error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingAsyncStager


def saved(root: Path, state: dict[str, Any]) -> Checkpointer:
    checkpointer = Checkpointer(str(root), stager=BlockingAsyncStager())
    checkpointer.save(1, state)
    checkpointer.wait()
    return checkpointer


def refused(checkpointer: Checkpointer, state: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as seen:
        checkpointer.restore(state)
    return str(seen.value)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_a_meta_tensor_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    trained = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(trained.parameters())
    trained(torch.ones(2)).sum().backward()
    adam.step()
    with saved(tmp_path, {"model": trained, "adam": adam, "x": [torch.ones(2)]}) as c:
        model = torch.nn.Linear(2, 2, device="meta")
        assert "'model.weight' is on the meta device" in refused(c, {"model": model})
        adam = torch.optim.Adam(model.parameters())
        assert "'adam.state.0.exp_avg' is on the meta device" in refused(c, {"adam": adam})
        assert "'x.0' is on the meta device" in refused(c, {"x": [torch.ones(2, device="meta")]})
        model.to_empty(device="cpu")
        assert c.restore({"model": model}) == 1
        assert torch.equal(model.weight, trained.weight)


def test_a_model_may_replace_its_meta_tensors_in_load_state_dict(tmp_path: Path) -> None:
    class Assigned(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = True) -> Any:
            return super().load_state_dict(state_dict, strict, assign)

    trained, model = torch.nn.Linear(2, 2), Assigned(2, 2, device="meta")
    with saved(tmp_path, {"model": trained}) as checkpointer:
        assert checkpointer.restore({"model": model}) == 1
    assert torch.equal(model.weight, trained.weight)


class Several(torch.optim.SGD):
    """An optimizer whose state dict has a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"first": super().state_dict(), "count": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["first"])


def test_an_optimizer_may_have_a_state_dict_of_another_form(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with saved(tmp_path, {"optimizer": Several(model.parameters(), lr=0.5)}) as checkpointer:
        other = Several(model.parameters(), lr=0.1)
        checkpointer.restore({"optimizer": other})
    assert other.param_groups[0]["lr"] == 0.5


def test_an_error_that_names_every_tensor_is_cut_short(tmp_path: Path) -> None:
    one = torch.nn.Linear(2, 2)
    many = torch.nn.Sequential(*(torch.nn.Linear(3, 2) for _ in range(100)))
    more = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100)))
    with saved(tmp_path, {"one": one, "many": many}) as checkpointer:
        missing = refused(checkpointer, {"one": many})
        assert "Missing key(s)" in missing
        assert len(missing) < 1500
        assert "characters)" in missing
        differing = refused(checkpointer, {"many": more})
        assert "size mismatch for 0.weight" in differing
        assert len(differing) < 1500


def test_a_missing_name_is_reported_with_the_saved_names(tmp_path: Path) -> None:
    with saved(tmp_path / "own", {"loader.rank0": {"at": 3}}) as checkpointer:
        assert "by each rank for itself. Ask for 'loader.rank0'" in refused(checkpointer, {"loader": {}})
        assert "Did you mean 'loader.rank0'?" in refused(checkpointer, {"loader.rank1": {}})
    with saved(tmp_path / "none", {}) as checkpointer:
        assert "no 'x' in it, only an empty state" in refused(checkpointer, {"x": 1})
    with saved(tmp_path / "many", {f"part{number:03}": number for number in range(500)}) as checkpointer:
        assert "part019, and 480 more" in refused(checkpointer, {"x": 1})
