"""The state of an optimizer finds its parameters by name, however they are grouped, tied, or shared out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Restore
from stagereg.errors import CheckpointError, ConfigError

from .test_optimizer_carries import restore, save


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Take a step whose gradients differ in each element."""
    for group in optimizer.param_groups:
        for x in group["params"]:
            x.grad = (x * 1.7 + 0.3).detach()
    optimizer.step()
    return optimizer


def refused(root: Path, **state: Any) -> str:
    before = [x.clone() for value in state.values() if isinstance(value, torch.nn.Module) for x in value.parameters()]
    with pytest.raises(CheckpointError) as raised:
        restore(root, **state)
    after = [x for value in state.values() if isinstance(value, torch.nn.Module) for x in value.parameters()]
    assert all(map(torch.equal, before, after)), "something was assigned"
    return str(raised.value)


def net(seed: int, *sizes: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def alike(one: torch.optim.Optimizer, other: torch.optim.Optimizer, *pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the state of each pair of parameters is the same."""
    return all(
        one.state[a].keys() == other.state[b].keys()
        and all(torch.equal(x, other.state[b][k]) for k, x in one.state[a].items())
        for a, b in pairs
    )


def test_groups_may_be_cut_otherwise_if_their_options_agree(tmp_path: Path) -> None:
    model, other = net(1, 3, 4, 2), net(2, 3, 4, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters(), lr=0.3))
    save(tmp_path, model=model, optimizer=optimizer)
    several = torch.optim.AdamW([{"params": [x]} for x in reversed([*other.parameters()])], lr=0.1)
    restore(tmp_path, model=other, optimizer=several)
    assert alike(optimizer, several, *zip(model.parameters(), other.parameters(), strict=True))
    assert {group["lr"] for group in several.param_groups} == {0.3}
    save(tmp_path / "tensor", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25)))
    several = torch.optim.SGD([{"params": [x]} for x in other.parameters()], lr=torch.tensor(1.0))
    restore(tmp_path / "tensor", model=other, optimizer=several)
    rates = [group["lr"] for group in several.param_groups]
    assert [x.item() for x in rates] == [0.25] * 4
    assert len({x.data_ptr() for x in rates}) == 4, "one tensor for several groups"


def test_groups_that_were_one_get_its_options_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(1, 3, 4), net(2, 3, 4)
    save(tmp_path, model=model, optimizer=stepped(torch.optim.AdamW(model.parameters(), lr=0.25)))
    groups = [{"params": [other[0].weight], "lr": 0.5}, {"params": [other[0].bias]}]
    for rate, warned in ((0.125, True), (0.5, False)):
        caplog.clear()
        optimizer = torch.optim.AdamW([dict(group) for group in groups], lr=rate)
        restore(tmp_path, model=other, optimizer=optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
        text = "'0.weight' and '0.bias' are in different parameter groups here, but were saved in one: both get its lr."
        assert (text in caplog.text) == warned


def test_one_group_of_several_with_other_options_is_refused(tmp_path: Path) -> None:
    model, other = net(1, 3, 4), net(2, 3, 4)
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias], "weight_decay": 0.0}]
    save(tmp_path, model=model, optimizer=stepped(torch.optim.AdamW(groups, lr=0.3)))
    text = refused(tmp_path, model=other, optimizer=torch.optim.AdamW(other.parameters()))
    assert "'0.weight' and others are in one parameter group here, but were saved in several with " in text
    assert "different lr, weight_decay; create the same groups" in text


def test_what_is_missing_or_one_too_many_is_listed(tmp_path: Path) -> None:
    model = net(1, *[3] * 14)
    save(tmp_path, model=model, optimizer=stepped(torch.optim.AdamW(model.parameters())))
    larger, smaller = net(2, *[3] * 20), net(2, *[3] * 3)
    text = refused(tmp_path, model=larger)
    assert (
        "'model' does not accept its saved state: 12 missing in the checkpoint: 13.weight, 13.bias, 14.weight" in text
    )
    assert "and 2 more" in text
    assert 'resume="never"' in text
    text = refused(tmp_path, model=smaller)
    assert "22 in the checkpoint but not here: 10.bias, 10.weight, 11.bias" in text
    optimizer = torch.optim.AdamW(larger.parameters())
    text = refused(tmp_path, optimizer=optimizer, model=torch.nn.Sequential(*larger[:13]))
    assert "'optimizer' does not accept" in text
    optimizer = torch.optim.AdamW(model[:2].parameters())
    text = refused(tmp_path, model=model, optimizer=optimizer)
    assert "'optimizer' does not accept its saved state: 22 in the checkpoint but not here" in text
    assert "before restore(), as that run did. If the checkpoint is of another model" in text
    optimizer.add_param_group({"params": model[2:].parameters()})  # as the message says
    restore(tmp_path, model=model, optimizer=optimizer)
    other = net(1, *[3] * 14).double()
    assert "0.weight (float32 [3, 3] in the checkpoint, float64 [3, 3] here)" in refused(tmp_path, model=other)


class Tied(torch.nn.Module):
    """Two names of one parameter, or two parameters."""

    def __init__(self, tied: bool, only: str = "") -> None:
        super().__init__()
        if only != "head":
            self.emb = torch.nn.Linear(3, 4, bias=False)
        if only != "emb":
            self.head = torch.nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_tied_parameters_are_found_by_either_name(tmp_path: Path) -> None:
    model, apart, again = Tied(True), Tied(False), Tied(True)
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    save(tmp_path / "tied", model=model, optimizer=optimizer)
    two = torch.optim.AdamW(apart.parameters())
    restore(tmp_path / "tied", model=apart, optimizer=two)
    assert alike(optimizer, two, (model.emb.weight, apart.emb.weight), (model.emb.weight, apart.head.weight))
    ends = [two.state[x]["exp_avg"].data_ptr() for x in apart.parameters()]
    assert ends[0] != ends[1], "one state for two parameters"
    save(tmp_path / "apart", model=apart, optimizer=two)
    one = torch.optim.AdamW(again.parameters())
    restore(tmp_path / "apart", model=again, optimizer=one)
    assert alike(optimizer, one, (model.emb.weight, again.emb.weight))


def test_several_models_and_optimizers_keep_apart(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        gen, disc, shift = net(seed, 3, 4), net(seed + 1, 3, 4), torch.nn.Parameter(torch.randn(2))
        each = {f"of_{name}": torch.optim.AdamW(x.parameters()) for name, x in (("gen", gen), ("disc", disc))}
        both = torch.optim.SGD([*gen.parameters(), *disc.parameters(), shift], lr=0.1, momentum=0.5)
        head = torch.optim.Adam(gen[0].parameters())
        return {"gen": gen, "disc": disc, "shift": shift, **each, "both": both, "head": [head]}

    state, fresh = made(1), made(5)
    for optimizer in (state["of_gen"], state["of_disc"], state["both"], *state["head"]):
        stepped(optimizer)
    save(tmp_path, **state)
    restore(tmp_path, **fresh)
    pairs = [*zip(state["gen"].parameters(), fresh["gen"].parameters(), strict=True)]
    others = [*zip(state["disc"].parameters(), fresh["disc"].parameters(), strict=True)]
    assert alike(state["of_gen"], fresh["of_gen"], *pairs)
    assert alike(state["of_disc"], fresh["of_disc"], *others)
    assert alike(state["both"], fresh["both"], *pairs, *others, (state["shift"], fresh["shift"]))
    assert alike(state["head"][0], fresh["head"][0], *pairs)


def test_numbers_are_matched_by_position(tmp_path: Path) -> None:
    model, other = net(1, 3, 4), net(2, 3, 4)
    optimizer = stepped(torch.optim.AdamW(model.parameters(), lr=0.3))
    pairs = [*zip(model.parameters(), other.parameters(), strict=True)]
    save(tmp_path / "alone", optimizer=optimizer)
    save(tmp_path / "plain", optimizer=optimizer.state_dict())
    save(tmp_path / "named", model=model, optimizer=optimizer)
    for name in ("alone", "plain", "named"):
        for state in ({}, {"model": other} if name == "named" else {}):
            fresh = torch.optim.AdamW(other.parameters())
            restore(tmp_path / name, optimizer=fresh, **state)
            assert alike(optimizer, fresh, *pairs), name
            assert fresh.param_groups[0]["lr"] == 0.3


def test_the_state_of_another_kind_of_optimizer_is_refused_unless_it_may_begin_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = net(1, 3, 4), net(2, 3, 4)
    saved = stepped(torch.optim.Adam(model.parameters(), lr=0.3))
    torch.optim.lr_scheduler.StepLR(saved, 1)  # which adds initial_lr to the groups
    save(tmp_path, model=model, optimizer=saved)
    kinds = {
        "than SGD: it has amsgrad=False, betas, .*; SGD has dampening, momentum, ": torch.optim.SGD,
        "it has decoupled_weight_decay=False; AdamW has decoupled_weight_decay=True": torch.optim.AdamW,
    }
    for said, kind in kinds.items():
        fresh = kind(other.parameters(), lr=0.7)
        why = refused(tmp_path, model=other, optimizer=fresh)
        assert re.search(said, why)
        assert why.endswith('alone from scratch, add restore=Restore(allow_missing=["optimizer"])')
        with Checkpointer(str(tmp_path), restore=Restore(allow_missing=["optimizer"])) as keeper:
            keeper.restore({"model": other, "optimizer": fresh})
        assert (fresh.param_groups[0]["lr"], len(fresh.state)) == (0.7, 0)
        assert torch.equal(model[0].weight, other[0].weight)
        assert "does not contain optimizer: started from scratch" in caplog.text
    for own in ({}, {"mine": 1}):
        again = torch.optim.Adam([{"params": [*other.parameters()], **own}])
        with Checkpointer(str(tmp_path), restore=Restore(allow_missing=["optimizer"])) as keeper:
            keeper.restore({"model": other, "optimizer": again})
        assert (again.param_groups[0]["lr"], len(again.state)) == (0.3, 2)


def test_a_new_entry_begins_from_scratch_where_the_run_says_so(tmp_path: Path) -> None:
    model = net(1, 3, 4)
    optimizer = stepped(torch.optim.Adam(model.parameters()))
    save(tmp_path, model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 7}
    only = "The checkpoint has no 'scheduler', only model, optimizer. To begin 'scheduler' alone from scratch, add "
    assert f'{only}restore=Restore(allow_missing=["scheduler"])' in refused(tmp_path, **state)
    with (
        Checkpointer(str(tmp_path), restore=Restore(allow_missing=["sheduler"])) as keeper,
        pytest.raises(
            CheckpointError, match=r"allow_missing=.* 'sheduler', which matches nothing in the state\. .* 'scheduler'"
        ),
    ):
        keeper.restore(state)
    with pytest.raises(ConfigError, match=r"allow_missing.* must be a list of names of the state, not 'epoch'"):
        Checkpointer(str(tmp_path), restore=Restore(allow_missing="epoch"))
    new = ["scheduler", "epoch"]
    with Checkpointer(str(tmp_path), restore=Restore(allow_missing=new)) as keeper:
        keeper.restore(state)
        assert (scheduler.last_epoch, state["epoch"]) == (0, 7)
        optimizer.step()
        scheduler.step()
        keeper.save(2, state)
    with Checkpointer(
        str(tmp_path), restore=Restore(allow_missing=new)
    ) as keeper:  # the same command again: now they are there
        later = {**state, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "epoch": 0}
        assert keeper.restore(later) == 2
        assert (later["scheduler"].last_epoch, later["epoch"]) == (1, 7)


def test_a_scaler_that_was_off_when_it_was_saved_may_begin_from_scratch(tmp_path: Path) -> None:
    save(tmp_path, model=net(1, 3, 4), scaler=torch.amp.GradScaler("cpu", enabled=False))
    state = {"model": net(1, 3, 4), "scaler": torch.amp.GradScaler("cpu")}
    assert "state dict is empty" in refused(tmp_path, **state)
    with Checkpointer(str(tmp_path), restore=Restore(allow_missing=["scaler"])) as keeper:
        assert keeper.restore(state) == 1
