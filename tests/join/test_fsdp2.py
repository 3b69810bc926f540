"""Every rank ends a join of an FSDP2 module with the numbers of a single process that has all the data of each step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import stagereg
from stagereg.testing import run_ranks

from .reference import EXACT, Case, Training, batch, difference, expected, length, net


def sharded(case: Case, reshard: bool = True) -> Any:
    module = net(case)
    for part in module.children():
        if any(True for _ in part.parameters()):
            fully_shard(part, reshard_after_forward=reshard)
    return fully_shard(module, reshard_after_forward=reshard)


def whole(value: Any) -> Any:
    """The same outcome with whole tensors instead of sharded ones. Collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def listed(case: Case, module: Any, training: Training) -> list[Any]:
    """What ``stagereg.Join`` makes of a list, so that it can be given to torch's ``Join`` too."""
    model = stagereg.build("joinable", "fsdp2", module=module)
    followers = training.joinables(model)[1:]
    steps = [getattr(each, "step", each) for each in followers]
    return [model, *(stagereg.build("joinable", "step", step=step, after=model) for step in steps)]


def join_of(library: str | None) -> tuple[Any, dict[str, Any]]:
    """The ``Join`` of a library, and the options of its mode."""
    return (TorchJoin, {}) if library == "torch" else (stagereg.Join, {"mode": library})


def one(rank: int, case: Case, library: str | None, reshard: bool) -> Any:
    module = sharded(case, reshard)
    training = Training(case, module, sharded=False)
    joinables = listed(case, module, training)
    kind, options = join_of(library)
    for epoch in range(case.epochs):
        if library == "planned":
            options["loader"] = range(length(case, rank, epoch))
        with kind(joinables, divide_by_initial_world_size=case.divide, **options):
            for step in range(length(case, rank, epoch)):
                syncs = (step + 1) % case.accumulate == 0
                if step % case.accumulate == 0:
                    training.zero("start")
                module.set_requires_gradient_sync(syncs)
                loss = module(batch(rank, epoch, step)).sum()
                if step % case.accumulate == 0:
                    training.zero("between")
                loss.backward()
                if syncs:
                    training.finish()
    return whole(training.outcome())


def train(rank: int, world_size: int, runs: list[tuple[Case, str | None, bool]]) -> list[Any]:
    return [one(rank, *run) for run in runs]


CASES = {
    "adam": Case(),
    "sgd with momentum, two epochs": Case(optimizer="sgd", epochs=2),
    "a rank without batches": Case(lengths=(0, 3, 5), last="scheduler"),
    "a function that clips and averages": Case(last="function", epochs=2),
    "divided by the active ranks": Case(divide=False, epochs=2),
    "gradients never zeroed": Case(zero="never"),
    "zeroed in place, at the end": Case(zero="zeros", when="end", epochs=2),
    "zeroed between forward and backward": Case(when="between"),
    "a rank that never sees a second step": Case(lengths=(0, 5, 1), zero="never"),
    "out of data inside an accumulation": Case(accumulate=2, lengths=(1, 3, 6)),
    "accumulation, active ranks": Case(accumulate=2, lengths=(2, 3, 6), divide=False),
}
LIBRARIES = {"torch's wire": None, "torch's Join": "torch", "counted": "counted", "planned": "planned"}


def hold(runs: list[tuple[Case, str | None, bool]]) -> None:
    outcomes = run_ranks(train, 3, args=(runs,), timeout_s=20 + 4 * len(runs))
    for i, (case, library, reshard) in enumerate(runs):
        reference = expected(case)
        for rank, results in enumerate(outcomes):
            assert difference(results[i], reference) < EXACT, f"{case}, {library}, {reshard}, rank {rank}"


def test_every_rank_has_the_numbers_of_a_single_process() -> None:
    """Every case in one of the ways, so that every way meets several cases."""
    ways = [(library, reshard) for reshard in (True, False) for library in LIBRARIES.values()]
    hold([(case, *ways[i % len(ways)]) for i, case in enumerate(CASES.values())])


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False], ids=["reshards", "keeps whole parameters"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_rank_has_the_numbers_of_a_single_process_in_every_way(library: str, reshard: bool) -> None:
    hold([(case, LIBRARIES[library], reshard) for case in CASES.values()])


class Pair(nn.Module):
    """Takes a keyword, gives nested outputs of which only some have gradients, and may run twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x)) * scale
        return (
            {"rank": x.argmax(), "parts": [hidden.mean(), (self.second(hidden),)]}
            if len(x)
            else {
                "rank": None,
                "parts": [hidden.sum(), (self.second(hidden),)],
            }
        )


def pairs(rank: int, world_size: int, lengths: tuple[int, ...], library: str | None) -> Any:
    torch.manual_seed(0)
    module: Any = Pair().double()
    for part in (module.first, module.second, module):
        fully_shard(part)
    model = stagereg.build("joinable", "fsdp2", module=module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = stagereg.build("joinable", "step", step=optimizer.step, after=model)
    kind, options = join_of(library)
    if library == "planned":
        options["loader"] = range(lengths[rank])
    with kind([model, step], **options):
        for i in range(lengths[rank]):
            optimizer.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for j in range(2):
                parts = module(batch(rank, j, i), scale=torch.tensor(2.0))["parts"]
                loss = loss + parts[0] + parts[1][0].sum()
            loss.backward()
            optimizer.step()
    return [param.full_tensor().detach() for param in module.parameters()]


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_two_forwards_a_step_with_keywords_and_nested_outputs(library: str | None) -> None:
    lengths = (2, 3)
    torch.manual_seed(0)
    module = Pair().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(max(lengths)):
        optimizer.zero_grad()
        for rank in range(2):
            for j in range(2):
                if lengths[rank] > i:
                    parts = module(batch(rank, j, i), scale=torch.tensor(2.0))["parts"]
                    ((parts[0] + parts[1][0].sum()) / 2).backward()
        optimizer.step()
    for outcome in run_ranks(pairs, 2, args=(lengths, library), timeout_s=30):
        assert difference(outcome, [param.detach() for param in module.parameters()]) < EXACT


def single(dtype: torch.dtype, root: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype) if root is None else root
    return fully_shard(module)


def divided(rank: int, world_size: int) -> Any:
    """Gradients of a step with one rank of two, without and with a divisor of one's own; what is left of it."""
    results: dict[Any, float] = {}
    for dtype in (torch.float32, torch.float64):
        for own in (None, 4.0):
            module = single(dtype)
            if own is not None:
                module.set_gradient_divide_factor(own)
            seen: list[float] = []
            note = functools.partial(noted, seen, module)
            with stagereg.Join([module, note], divide_by_initial_world_size=False):
                for _ in range(1 + rank):
                    module.zero_grad()
                    module(torch.ones(2, 4, dtype=dtype)).sum().backward()
                    note()
            results[str(dtype), own] = seen[-1]
            group = module._get_fsdp_state()._fsdp_param_groups[0]
            assert group.gradient_divide_factor == own
            assert not group.force_sum_reduction_for_comms
            assert len(module._forward_pre_hooks) == 1 == len(module._forward_hooks)  # FSDP2's own
    return results


def noted(seen: list[float], module: Any) -> None:
    seen.append(float(module[1].bias.grad.full_tensor()))


def test_the_divisor_is_scaled_in_every_dtype_and_put_back() -> None:
    for results in run_ranks(divided, 2, timeout_s=30):
        # Two samples on one of two ranks: over the active rank 2, over a divisor of one's own for two ranks 2 * 2 / 4.
        wanted = {None: 2.0, 4.0: 1.0}
        assert results == {(str(dtype), own): wanted[own] for dtype in (torch.float32, torch.float64) for own in wanted}


def throwing(rank: int, world_size: int, library: str | None) -> Any:
    module = single(torch.float64)
    model = stagereg.build("joinable", "fsdp2", module=module)
    kind, options = join_of(library)
    steps = 0
    error = None
    try:
        with kind([model], throw_on_early_termination=True, **options):
            for step in range((4, 2, 6)[rank]):
                module(batch(rank, 0, step)).sum().backward()
                steps += 1
    except RuntimeError as caught:
        error = caught
    return steps, isinstance(error, stagereg.UnevenInputsError)


@pytest.mark.parametrize("library", [None, "counted", "torch"])
def test_all_ranks_throw_at_the_same_step(library: str | None) -> None:
    ours = library != "torch"
    found = run_ranks(throwing, 3, args=(library,), timeout_s=30)
    assert [(steps, kind or not ours) for steps, kind in found] == [(2, True)] * 3


class Opaque:
    """A batch that only its module can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Odd(nn.Module):
    """Takes opaque batches too, and cannot run on an empty one unless it is ``careful``."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.careful = careful

    def forward(self, x: Any) -> torch.Tensor:
        x = x.x if isinstance(x, Opaque) else x
        result: torch.Tensor = self.linear(x.flatten(1) if self.careful else x.view(len(x), -1))
        return result


def odd(rank: int, world_size: int, careful: bool, opaque: bool, example: Any) -> str:
    module = single(torch.float64, Odd(careful).double())
    model = stagereg.build("joinable", "fsdp2", module=module, example=example)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.no_grad():
        module.linear.bias.fill_(1.0)
    try:
        with stagereg.Join([model, optimizer]):
            for step in range(2 * rank):
                x = batch(rank, 0, step)
                optimizer.zero_grad()
                module(Opaque(x) if opaque else x).sum().backward()
                optimizer.step()
    except stagereg.StageregError as error:
        return str(error)
    return f"{module.linear.bias.full_tensor().item():.6f}"


def test_a_module_that_cannot_run_on_nothing_is_named_on_all_ranks() -> None:
    for text in run_ranks(odd, 2, args=(False, False, None), timeout_s=30):
        assert "Odd cannot run on an empty batch" in text


def test_inputs_that_cannot_be_emptied_are_refused_in_the_first_step() -> None:
    for text in run_ranks(odd, 2, args=(True, True, None), timeout_s=30):
        assert "holds no tensor" in text
        assert "'fsdp2', module=..., example=..." in text


@pytest.mark.parametrize("as_tuple", [True, False])
def test_an_example_stands_for_inputs_that_cannot_be_emptied(as_tuple: bool) -> None:
    example = torch.ones(2, 4, dtype=torch.float64)
    # Two steps of three samples on one of two ranks.
    bias = f"{1 - 0.1 * 2 * 3 / 2:.6f}"
    assert run_ranks(odd, 2, args=(True, True, (example,) if as_tuple else example), timeout_s=30) == [bias] * 2


def kept(rank: int, world_size: int) -> bool:
    module = single(torch.float64)
    with stagereg.Join([module]):
        x = batch(rank, 0, 0)
        module(x).sum().backward()
        there = weakref.ref(x)
        del x
        return there() is None


def test_no_batch_is_kept_alive() -> None:
    assert run_ranks(kept, 2, timeout_s=30) == [True] * 2


def switched(rank: int, world_size: int) -> str:
    module = single(torch.float64)
    try:
        with stagereg.Join([module]):
            loss = module(batch(rank, 0, 0)).sum()
            module.set_requires_gradient_sync(False)
            loss.backward()
    except stagereg.StageregError as error:
        return str(error)
    return ""


def test_a_switch_between_forward_and_backward_is_refused() -> None:
    for text in run_ranks(switched, 2, timeout_s=30):
        assert "call it before the forward" in text


def meshes(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module: Any = fully_shard(nn.Linear(4, 4).double(), mesh=mesh)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.5)
    lengths = (1, 1, 2, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with stagereg.Join([module, optimizer]):
        for _ in range(lengths[rank]):
            optimizer.zero_grad()
            module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
    return module.bias.full_tensor().detach()


def test_replicated_shards_are_joined_too() -> None:
    # Steps of four, two and one of four ranks.
    for bias in run_ranks(meshes, 4, timeout_s=30):
        assert difference(bias, torch.full((4,), 0.5 - 0.1 * (1 + 0.5 + 0.25), dtype=torch.float64)) < EXACT
