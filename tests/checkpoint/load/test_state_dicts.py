"""State dicts in the place of their objects in a state: a restore that leaves the objects as they are is not silent."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Restore

from ...support.installed import needs
from ..state.test_nested import refused, restore, save

WARNED = (
    "stagereg: the state has state dicts instead of objects: {}. restore() changes these dicts only. Put the objects "
    "into the state, as in {{'model': model, 'optimizer': optimizer}}; or pass each dict to "
    "load_state_dict() of its object after restore()."
)


class Net(torch.nn.Module):
    def __init__(self, head: str = "head", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 2, dtype=dtype)
        setattr(self, head, torch.nn.Linear(2, 1, dtype=dtype))


def warnings(caplog: pytest.LogCaptureFixture, *modules: str) -> list[str]:
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [each.getMessage() for each in found if each.name.rpartition(".")[2] in modules]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


@needs("diagnostics")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda net, opt: {"net": net, "opt": opt.state_dict()}, "'opt' (optimizer)"),
        (lambda net, opt: {"net": net.state_dict(), "opt": opt}, "'net' (module)"),
        (
            lambda net, opt: {"ckpt": {"net": net.state_dict(), "opt": opt.state_dict(), "epoch": 3}},
            "'ckpt.net' (module), 'ckpt.opt' (optimizer)",
        ),
        (lambda net, opt: {"net": torch.nn.DataParallel(net).state_dict()}, "'net' (module)"),
        (lambda net, opt: {"net": net, "best": net.state_dict(), "ema": copy.deepcopy(net.state_dict())}, ""),
        (lambda net, opt: {"shadow": dict(net.state_dict()), "cfg": {"lr": 0.1}, "numbers": {1: [2, 3]}}, ""),
    ],
)
def test_state_dicts_in_the_place_of_objects_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[..., dict[str, Any]], named: str
) -> None:
    model = Net()
    optimizer = optimizer_of(model)
    with Checkpointer(str(tmp_path), every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.maybe_save(step, make(model, optimizer))
    assert warnings(caplog, "checks") == [WARNED.format(named)] * bool(named)


@needs("diagnostics")
def test_a_run_that_restores_nothing_may_save_state_dicts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), resume="never") as checkpointer:  # as the adapter of Lightning, which loads itself
        checkpointer.save(1, {"state_dict": Net().state_dict()})
    assert warnings(caplog, "checks") == []


def test_dicts_that_are_given_to_load_state_dict_after_the_restore_bring_objects_back(tmp_path: Path) -> None:
    model = Net()
    optimizer = optimizer_of(model)
    save(tmp_path, {"model": model.state_dict(), "opt": optimizer.state_dict()})
    again = Net()
    new = torch.optim.Adam(again.parameters())
    state = restore(tmp_path, {"model": again.state_dict(), "opt": new.state_dict()})
    again.load_state_dict(state["model"])
    new.load_state_dict(state["opt"])
    assert torch.equal(again.head.weight, model.head.weight)
    assert torch.equal(new.state[again.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])


def nested(weights: Any) -> dict[str, Any]:
    return {"ckpt": {"model": weights, "epoch": 3}}


@pytest.mark.parametrize("build", [lambda weights: {"model": weights}, nested])
@pytest.mark.parametrize(
    ("saved", "here", "named", "how"),
    [
        (lambda: torch.compile(Net(), backend="eager"), Net, "_orig_mod.body.weight", {}),
        (lambda: torch.nn.DataParallel(Net()), Net, "module.head.bias", {}),
        (Net, lambda: torch.nn.DataParallel(Net()), "module.head.bias", {}),
        (Net, lambda: Net("other"), "other.weight", {"rename": {"head": "other"}}),
        (
            lambda: Net(dtype=torch.bfloat16),
            Net,
            "bfloat16 [2, 2] in the checkpoint, float32 [2, 2] here",
            {"cast": True},
        ),
    ],
)
def test_weights_that_a_state_dict_does_not_take_are_refused_and_the_module_takes_them(
    tmp_path: Path,
    build: Callable[[Any], dict[str, Any]],
    saved: Callable[[], Any],
    here: Callable[[], Any],
    named: str,
    how: dict[str, Any],
) -> None:
    old, new = saved(), here()
    save(tmp_path, build(old.state_dict()))
    before = copy.deepcopy(new.state_dict())
    text = refused(lambda: restore(tmp_path, build(new.state_dict())))
    assert named in text
    assert "model' is the state dict of a module here" in text
    assert all(torch.equal(x, before[name]) for name, x in new.state_dict().items())
    restore(tmp_path, build(new), restore=Restore(**how))
    assert all(torch.equal(x, y.float()) for x, y in zip(new.parameters(), old.parameters(), strict=True))


def test_a_checkpoint_with_more_or_without_the_state_dict_is_refused(tmp_path: Path) -> None:
    save(tmp_path, nested({**Net().state_dict(), "more": torch.ones(1)}))
    assert "1 in the checkpoint but not here: more" in refused(lambda: restore(tmp_path, nested(Net().state_dict())))
    save(tmp_path, {"ckpt": {"epoch": 3}})
    assert "4 missing in the checkpoint: " in refused(lambda: restore(tmp_path, nested(Net().state_dict())))


def test_the_state_dict_of_a_module_takes_the_same_weights_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    torch.nn.init.constant_(old.weight, 5)
    save(tmp_path, nested(old.state_dict()))
    restore(tmp_path, nested(new.state_dict()))
    assert torch.equal(new.weight, old.weight)
    half = torch.nn.BatchNorm1d(2).bfloat16()
    restore(tmp_path, nested(half.state_dict()), restore=Restore(cast=True))
    assert torch.equal(half.weight.float(), old.weight)
    assert not warnings(caplog, "placing")


def test_tensors_of_plain_dicts_that_the_checkpoint_does_not_fill_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weights(model: torch.nn.Module) -> dict[str, Any]:
        return get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))

    assert type(weights(Net())) is dict
    save(tmp_path, {"model": weights(Net()), "x": torch.ones(2), "grows": torch.ones(3), "cache": {1: torch.ones(1)}})
    here = {"x": torch.zeros(2), "grows": torch.zeros(0), "cache": {}, "model": weights(Net())}
    restore(tmp_path, here)
    assert len(here["grows"]) == 3
    assert here["cache"]
    assert not warnings(caplog, "placing")
    restore(tmp_path, {"model": weights(Net("other")), "x": torch.zeros(2, dtype=torch.float64)})
    [text] = warnings(caplog, "placing")
    assert (
        "step-00000001 does not fill: model.other.weight (missing in the checkpoint), "
        "model.other.bias (missing in the checkpoint), x" in text
    )
    assert "x (float32 [2] in the checkpoint, float64 [2] here)" in text
    assert "body" not in text


class Averages:
    """Keeps an average that is trained, and one that is not."""

    def __init__(self, value: float) -> None:
        self.state = {"w": torch.full((3,), value).requires_grad_(), "v": torch.full((2,), value), "n": int(value)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_gets_tensors_that_require_gradients_as_its_own_do(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.save(1, {"averages": Averages(4.0)})
        checkpointer.restore({"averages": (mine := Averages(0.0))})
    assert mine.state["w"].tolist() == [4.0] * 3
    assert (mine.state["w"].requires_grad, mine.state["v"].requires_grad, mine.state["n"]) == (True, False, 4)
