"""What a rank would write is sent once, as long as it stays as it is; and anew where it does not."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.checkpoint.format.manifest import step_name
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.unchanged import pack, unpack
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.directory import Directory
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks
from tests.support.reading import opened


class Failing(DcpStorage):
    """Fails to write on one rank when it is told to."""

    fails = False
    wraps = DcpStorage()

    def write_files(self, *args: Any) -> Any:
        if self.fails:
            raise OSError("the disk is full")
        return super().write_files(*args)


def save(rank: int, size: int, root: str, happens: str) -> tuple[list[int], list[int], bool]:
    """Save eight steps; return the bytes of this rank's messages in each, and how many; and whether all came back."""
    counts: list[list[int]] = []
    collect, hand_out = RankGroup._collect, RankGroup._hand_out

    def collected(group: RankGroup, post: bytes, limit: Any) -> list[bytes]:
        counts[-1].append(len(post))
        return collect(group, post, limit)

    def handed_out(group: RankGroup, answers: Any, limit: Any) -> bytes:
        answer = hand_out(group, answers, limit)
        counts[-1].append(len(answer))
        return answer

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    first, moved, *rest = model.parameters()
    optimizer = torch.optim.Adam([{"params": [first, moved], "lr": 0.25}, {"params": rest, "lr": 0.5}])
    storage = Failing()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "x": torch.ones(3)}
    with Checkpointer(root, keep=9, stager=BlockingAsyncStager(), storage=storage) as keeper:
        RankGroup._collect, RankGroup._hand_out = collected, handed_out  # type: ignore[method-assign]
        for step in range(8):
            for x in model.parameters():
                x.grad = torch.full_like(x, step)
            optimizer.step()
            state["step"] = step
            if step == 6 and happens == "one rank has more" and rank == 1:
                state["more"] = torch.ones(3)
            if step == 6 and happens == "another object":
                state["step"] = torch.float16  # as many bytes in the file
            if step == 6 and happens == "another dtype":
                state["x"] = torch.full((3,), 7, dtype=torch.int32)
            if step == 6 and happens == "other groups":
                one, other = optimizer.param_groups
                one["params"], other["params"] = [first], [*rest, moved]
            storage.fails = rank == 1 and step == 5 and happens == "a save fails"
            counts.append([])
            try:
                keeper.save(step, state)
                keeper.wait()
            except CheckpointError:
                assert storage.fails or happens == "a save fails"
    RankGroup._collect, RankGroup._hand_out = collect, hand_out  # type: ignore[method-assign]
    other = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    fresh: dict[str, Any] = {"model": other, "step": 0, "x": torch.empty(0)}
    with Checkpointer(root, stager=BlockingAsyncStager(), storage=Failing()) as keeper:
        assert keeper.restore(fresh) == 7
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    same &= fresh["x"].dtype == state["x"].dtype and torch.equal(fresh["x"], state["x"])
    rate = "optimizer.param_groups.0.bias.lr"
    found: dict[str, Any] = {rate: 0.0}
    torch.distributed.checkpoint.load(found, checkpoint_id=f"{root}/latest", no_dist=True)
    same &= found[rate] == (0.5 if happens == "other groups" else 0.25)
    return (
        [sum(each) for each in counts],
        [len(each) for each in counts],
        same and str(fresh["step"]) == str(state["step"]),
    )


def scheduled(rank: int, size: int, root: str) -> tuple[list[int], int, int]:
    """Train stages whose rates and random numbers change.

    Returns:
        This rank's bytes in each save; those of the index; and how often it listed a directory.
    """
    counts: list[int] = []
    listed: list[str] = []
    collect, files = RankGroup._collect, Directory.list

    def counted(place: Directory, written: str, named: Iterable[str] = ()) -> Any:
        if written.endswith(".tmp"):  # what is being saved
            listed.append(written)
        return files(place, written)

    def collected(group: RankGroup, post: bytes, limit: Any) -> list[bytes]:
        counts[-1] += len(post)
        return collect(group, post, limit)

    model = torch.nn.ModuleDict({f"layer_{rank * 40 + i}": torch.nn.Linear(2, 2) for i in range(40)})
    weights, biases = ([x for x in model.parameters() if x.ndim == ndim] for ndim in (2, 1))
    optimizer = torch.optim.Adam([{"params": weights, "lr": 0.25}, {"params": biases, "lr": 0.5}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.manual_seed(rank)
    with Checkpointer(root, stager=BlockingAsyncStager()) as keeper:
        RankGroup._collect, Directory.list = collected, counted  # type: ignore[method-assign]
        for step in range(6):
            for x in model.parameters():
                x.grad = torch.full_like(x, random.gauss(0, 1) + float(torch.rand(())))
            optimizer.step()
            schedule.step()
            counts.append(0)
            keeper.save(step, state)
            keeper.wait()
        RankGroup._collect, Directory.list = collect, files  # type: ignore[method-assign]
    return counts, len((Path(root) / "latest" / "index.json").read_bytes()), len(listed)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(scheduled, 2, args=(str(tmp_path_factory.mktemp("root") / "x"),), timeout_s=120)


def test_rates_and_random_numbers_do_not_send_the_plan_again(stages: Any) -> None:
    for counts, index, _ in stages:
        assert counts[0] > 5000
        assert max(counts[4:]) < counts[0] / 2, counts
        assert index < 120_000


def test_a_directory_is_listed_three_times_a_save_and_by_rank_zero(stages: Any) -> None:
    assert [listed for *_, listed in stages] == [18, 0]


def test_what_ranks_send_alike_arrives_as_one_object() -> None:
    arrived = unpack([pack([{"x": [1, 2]}, rank], 3) for rank in range(3)], 3)
    assert arrived[0][0] is arrived[1][0] is arrived[2][0]
    assert arrived == [[{"x": [1, 2]}, rank] for rank in range(3)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = ("nothing", "a save fails", "one rank has more", "another object", "another dtype", "other groups")
    return {
        case: run_ranks(save, 2, args=(str(tmp_path_factory.mktemp("root") / "x"), case), timeout_s=120)
        for case in cases
    }


def test_a_warm_save_sends_less_than_a_thousand_bytes(ran: dict[str, Any]) -> None:
    nbytes, calls, same = ran["nothing"][1]
    assert same
    assert nbytes[0] > 3000
    assert max(nbytes[4:]) < 1000, nbytes
    assert calls == [6 if has("replicas") else 4, *[4] * 7], "in the first save the ranks compare as well"


@pytest.mark.parametrize(
    "case", ["a save fails", "one rank has more", "another object", "another dtype", "other groups"]
)
def test_what_changed_is_sent_anew_in_no_further_round_and_comes_back(ran: dict[str, Any], case: str) -> None:
    for nbytes, calls, same in ran[case]:
        assert same
        assert nbytes[6] > 3000, nbytes
        assert calls[6] == 4


def test_a_state_of_the_same_kinds_has_the_plan_of_the_last_one() -> None:
    planner, plans = StatePlanner(), []
    for x in (torch.ones(3), torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(3, requires_grad=True)):
        planner.set_up_planner({"x": x, "n": 1}, None, True)
        plans.append(planner.create_local_plan())
    assert plans[0] is plans[1]
    assert len({*map(id, plans)}) == 3
    planner.set_up_planner({"y": torch.ones(3), "n": 1}, None, True)
    assert planner.create_local_plan().items[0].index.fqn == "y"


DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool]


def fill(dtype: torch.dtype, shape: list[int], value: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype) if shape else torch.tensor(value, dtype=dtype)


def change(own: dict[str, Any], chosen: random.Random) -> None:
    """Change values of an entry, and perhaps a shape, a dtype, a key, the order of keys, or an object."""
    what = chosen.choice(["nothing", "shape", "dtype", "new", "gone", "object", "moved"])
    name = chosen.choice(list(own))
    if what == "new":
        own[f"new{chosen.randrange(4)}"] = torch.zeros(2)
    elif what == "gone" and len(own) > 2:
        del own[name]
    elif what == "object":
        own["object"] = (1,) * chosen.randrange(1, 4), torch.float16
    elif what == "moved":
        own[name] = own.pop(name)
    for each, x in own.items():
        if isinstance(x, torch.Tensor):
            dtype = chosen.choice(DTYPES) if (what, each) == ("dtype", name) else x.dtype
            shape = [chosen.randrange(4) for _ in range(2)] if (what, each) == ("shape", name) else [*x.shape]
            own[each] = fill(dtype, shape, chosen.randrange(2))


def changing(rank: int, size: int, root: str, seed: int) -> tuple[list[int], list[str]]:
    """Save steps between which one rank changes what it has; return the checkpoints, and what is wrong in them."""
    chosen, together = random.Random(f"{seed} {rank}"), random.Random(seed)
    storage = Failing()
    own: dict[str, Any] = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    state: dict[str, Any] = {"own": stagereg.per_rank(own), "x": torch.ones(2)}
    saved: dict[int, Any] = {}
    with Checkpointer(root, keep=99, stager=BlockingAsyncStager(), storage=storage) as keeper:
        for step in range(16):
            changes, dtype, fails = together.randrange(size), together.choice(DTYPES), together.random() < 0.15
            state["x"] = fill(dtype if step % 5 == 0 else state["x"].dtype, [2], step % 2)
            if rank == changes and step % 3:
                change(own, chosen)
            storage.fails = fails and rank == changes
            saved[step] = copy.deepcopy({"own": own, "x": state["x"]})
            with contextlib.suppress(CheckpointError):
                keeper.save(step, state)
                keeper.wait()
        storage.fails = False
        with contextlib.suppress(CheckpointError):
            keeper.save(16, state)
        keeper.save(17, state)
    steps, wrong = [], []
    for step, expected in saved.items():
        if (path := Path(root) / step_name(step)).exists():
            steps.append(step)
            with opened(path, verify=True) as checkpoint:
                found = {"own": checkpoint.entry("own", rank), "x": checkpoint.entry("x")}
            wrong += [] if same_state(found, expected) else [f"step {step} of rank {rank}: {found}, not {expected}"]
    return steps, wrong


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same_state(one[name], other[name]) for name in one)
    return bool(one == other)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_whatever_changes_on_any_rank_every_checkpoint_has_it(tmp_path: Path, seed: int) -> None:
    for steps, wrong in run_ranks(changing, 3, args=(str(tmp_path / "x"), seed), timeout_s=120):
        assert len(steps) >= 6
        assert not wrong
