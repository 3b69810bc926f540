"""What a program has forgotten is logged once, with the line to write, and no right program is suspected."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.swa_utils import AveragedModel

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.base.hooks import AFTER_STEPS, PLATEAUS
from stagereg.data import ResumableSampler
from stagereg.extensions.diagnostics.checks import Diagnostics
from stagereg.extensions.diagnostics.forgotten import ForgottenObjects, GivenSteps
from stagereg.testing import run_ranks

LOGGER = "stagereg.extensions.diagnostics.forgotten"


def said(caplog: Any, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Sharpness(torch.optim.Optimizer):
    """An optimizer that steps another one, whose state it does not save, as implementations of SAM do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Trainer:
    """Saves what it has, as live tensors or as copies."""

    def __init__(self, copies: bool, **parts: Any) -> None:
        self.parts, self.copies = parts, copies

    def state_dict(self) -> dict[str, Any]:
        found = {name: part.state_dict() for name, part in self.parts.items()}
        return copy.deepcopy(found) if self.copies else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Program:
    """What a program makes, of which each case puts some into its state."""

    def __init__(self) -> None:
        self.model, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.adam = AdamW(self.model.parameters(), 0.1)
        self.sgd = SGD(self.model.parameters(), 0.1)
        self.momentum = SGD(self.model.parameters(), 0.1, 0.9)
        self.of_other = AdamW(self.other.parameters(), 0.1)

    def train(self, folder: Path, state: dict[str, Any], *steps: Any, first: int = 1, saves: int = 3) -> None:
        with Checkpointer(folder, every=1) as checkpointer:
            for step in range(first, first + saves):
                (self.model(torch.ones(2)).sum() + self.other(torch.ones(2)).sum()).backward()
                for each in steps:
                    each.step(*[1.0] * isinstance(each, lr_scheduler.ReduceLROnPlateau))
                checkpointer.maybe_save(step, state)


Made = tuple[dict[str, Any], list[Any]]  # the state, and what steps


def scheduled(kind: Callable[..., Any], optimizer: Any, *arguments: Any) -> list[Any]:
    return [optimizer, kind(optimizer, *arguments)]


def sequence(optimizer: Any) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


FAULTS: dict[str, tuple[Callable[[Program], Made], list[str]]] = {
    "an optimizer": (lambda p: ({"model": p.model}, [p.adam]), ["lacks AdamW, which trains 'model': a resumed"]),
    "two": (
        lambda p: ({"d": p.other, "g": p.model}, [p.adam, p.of_other]),
        [
            "lacks AdamW, which trains 'd' and AdamW, which trains 'g': a resumed",
            "; state['optimizer_2'] = self.adam",
        ],
    ),
    "one of two": (
        lambda p: ({"d": p.other, "g": p.model, "optimizer": p.of_other}, [p.adam, p.of_other]),
        ["lacks AdamW, which trains 'g': a resumed"],
    ),
    "of a model in a container": (lambda p: ({"nets": {"g": p.model}}, [p.adam]), ["AdamW, which trains 'nets.g'"]),
    "of parameters in an object": (
        lambda p: ({"trainer": Trainer(False, model=p.model)}, [p.adam]),
        ["AdamW, which trains 'trainer'"],
    ),
    "beside an average of the weights": (
        lambda p: ({"model": p.model, "ema": AveragedModel(p.model)}, [p.adam]),
        ["AdamW, which trains 'model'"],
    ),
    "inside of a wrapper": (lambda p: ({"model": p.model}, [Wrapper(p.adam)]), ["AdamW, which trains 'model'"]),
    "below one that has none of its state": (
        lambda p: ({"model": p.model, "optimizer": (outer := Sharpness(p.momentum))}, [outer]),
        ["lacks SGD, which trains 'model': a resumed"],
    ),
    "whose learning rate alone is its state": (
        lambda p: ({"model": p.model}, scheduled(lr_scheduler.ExponentialLR, p.sgd, 0.9)),
        ["SGD, which trains 'model': a resumed run begins with a new optimizer"],
    ),
    "a scheduler": (
        lambda p: ({"model": p.model, "optimizer": p.sgd}, scheduled(lr_scheduler.ExponentialLR, p.sgd, 0.9)),
        ["lacks the learning rate scheduler of SGD, which trains 'model'"],
    ),
    "a scheduler of several": (
        lambda p: ({"model": p.model, "optimizer": p.adam}, [p.adam, sequence(p.adam)]),
        ["lacks the learning rate scheduler of AdamW, which trains 'model'"],
    ),
    "a scheduler that also changes momentum": (
        lambda p: (
            {"model": p.model, "optimizer": p.momentum},
            scheduled(lr_scheduler.OneCycleLR, p.momentum, 1.0, 9),
        ),
        ["lacks the learning rate scheduler of SGD, which trains 'model'"],
    ),
    "a scheduler of a metric": (
        lambda p: ({"model": p.model, "optimizer": p.sgd}, scheduled(lr_scheduler.ReduceLROnPlateau, p.sgd)),
        ["lacks the learning rate scheduler of SGD, which trains 'model'"],
    ),
    "a scheduler of a metric, beside another": (
        lambda p: (
            {"model": p.model, "optimizer": p.sgd, "warmup": (warmup := lr_scheduler.ConstantLR(p.sgd))},
            [p.sgd, warmup, lr_scheduler.ReduceLROnPlateau(p.sgd)],
        ),
        ["lacks the learning rate scheduler of SGD, which trains 'model'"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forgotten_object_is_named_once(fault: str, tmp_path: Path, caplog: Any) -> None:
    make, parts = FAULTS[fault]
    program = Program()
    state, steps = make(program)
    program.train(tmp_path, state, *steps)
    [text] = said(caplog)
    assert [part for part in parts if part not in text] == [], text
    assert text.count("which trains") == parts[0].count("which trains"), text


def of_trainer(copies: bool) -> Callable[[Program], Made]:
    def make(p: Program) -> Made:
        scheduler = lr_scheduler.ReduceLROnPlateau(p.adam)
        return {"model": p.model, "trainer": Trainer(copies, opt=p.adam, lr=scheduler)}, [p.adam, scheduler]

    return make


def with_schedule(p: Program, kind: Callable[[Any], Any], holds: Callable[[Any], Any] = lambda x: x) -> Made:
    scheduler = kind(p.adam)
    return {"model": p.model, "optimizer": p.adam, "scheduler": holds(scheduler)}, [p.adam, scheduler]


RIGHT: dict[str, Callable[[Program], Made]] = {
    "the optimizer is there": lambda p: ({"model": p.model, "optimizer": p.adam}, [p.adam]),
    "in a list": lambda p: ({"models": [p.model], "each": [p.adam]}, [p.adam]),
    "in a dict": lambda p: ({"nets": {"g": p.model}, "each": {"g": p.adam}}, [p.adam]),
    "a wrapper is there": lambda p: ({"model": p.model, "optimizer": Wrapper(p.adam)}, [p.adam]),
    "it has no state": lambda p: ({"model": p.model}, [p.sgd]),
    "it trains another model": lambda p: ({"model": p.model, "optimizer": p.adam}, [p.adam, p.of_other]),
    "nothing of the state is trained": lambda p: ({"n": 1, "x": torch.ones(2)}, [p.adam]),
    "each rank's own": lambda p: ({"model": p.model, "optimizer": stagereg.per_rank(p.adam)}, [p.adam]),
    "an object of the program has it": of_trainer(copies=False),
    "an object of the program copies it": of_trainer(copies=True),
    "the average of a model": lambda p: (
        {"model": p.model, "ema": AveragedModel(p.model), "optimizer": p.adam},
        [p.adam, p.of_other],
    ),
    "a scheduler": lambda p: with_schedule(p, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "a scheduler of several": lambda p: with_schedule(p, sequence),
    "a scheduler around others": lambda p: with_schedule(p, lambda o: lr_scheduler.ChainedScheduler([sequence(o)])),
    "a scheduler of a metric": lambda p: with_schedule(p, lr_scheduler.ReduceLROnPlateau),
    "a scheduler in an object": lambda p: with_schedule(p, sequence, lambda x: Trainer(False, lr=x)),
    "schedulers in a list": lambda p: with_schedule(p, sequence, lambda x: [x]),
    "the learning rate is set by hand": lambda p: ({"model": p.model}, [p.sgd, ByHand(p.sgd)]),
}


class ByHand:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize("right", RIGHT)
def test_a_right_program_is_not_suspected(right: str, tmp_path: Path, caplog: Any) -> None:
    program = Program()
    state, steps = RIGHT[right](program)
    program.train(tmp_path, state, *steps)
    assert said(caplog) == []


def test_an_optimizer_that_another_one_has_replaced_is_not_named(tmp_path: Path, caplog: Any) -> None:
    program = Program()
    state = {"model": program.model, "optimizer": program.adam}
    with Checkpointer(tmp_path, every=1) as checkpointer:
        for step, optimizer in enumerate([program.momentum, program.adam, program.adam, program.adam], 1):
            program.model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step > 1:
                checkpointer.maybe_save(step, state)
    assert said(caplog) == []


def test_an_optimizer_that_another_checkpointer_saves_is_not_named(tmp_path: Path, caplog: Any) -> None:
    program = Program()
    with Checkpointer(tmp_path / "all", every=2) as checkpointer:
        checkpointer.restore({"model": program.model, "optimizer": program.adam})
        program.train(tmp_path / "weights", {"model": program.model}, program.adam)
    assert said(caplog) == []


def test_an_optimizer_that_begins_later_is_named(tmp_path: Path, caplog: Any) -> None:
    program = Program()
    with Checkpointer(tmp_path, every=1) as checkpointer:
        for step in range(1, 6):
            (program.model(torch.ones(2)).sum() + program.other(torch.ones(2)).sum()).backward()
            for optimizer in [program.adam, program.of_other][: 1 + step // 4]:
                optimizer.step()
            checkpointer.maybe_save(step, {"g": program.model, "d": program.other, "optimizer": program.adam})
            assert len(said(caplog)) == step // 4


def test_the_line_of_the_message_ends_the_message(tmp_path: Path, caplog: Any) -> None:
    def run(name: str, follow: str = "") -> list[str]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        my_optimizer = AdamW(model.parameters(), 0.1)
        warmup, decay = lr_scheduler.ConstantLR(my_optimizer), lr_scheduler.ExponentialLR(my_optimizer, 0.9)
        my_scheduler = lr_scheduler.SequentialLR(my_optimizer, [warmup, decay], [2])
        state: dict[str, Any] = {"model": model}
        exec(follow, {}, {"state": state, "my_optimizer": my_optimizer, "my_scheduler": my_scheduler})
        caplog.clear()
        with Checkpointer(tmp_path / name, every=1) as checkpointer:
            for step in range(1, 4):
                model(torch.ones(2)).sum().backward()
                my_optimizer.step()
                my_scheduler.step()
                checkpointer.maybe_save(step, state)
        return said(caplog)

    [text] = run("forgotten")
    lines = text.split("restore(): ")[1].split(". To silence")[0]
    assert lines == "state['optimizer'] = my_optimizer; state['scheduler'] = my_scheduler"
    assert run("followed", lines) == []
    logging.getLogger(LOGGER).setLevel("ERROR")
    try:
        assert run("silenced") == []
    finally:
        logging.getLogger(LOGGER).setLevel("NOTSET")
    assert f"logging.getLogger('{LOGGER}').setLevel('ERROR')" in text


def test_the_line_names_an_attribute_and_a_free_key(tmp_path: Path, caplog: Any) -> None:
    program = Program()
    with Checkpointer(tmp_path) as checkpointer:
        for optimizer in (program.adam, program.of_other):
            optimizer.zero_grad()
            (program.model(torch.ones(2)).sum() + program.other(torch.ones(2)).sum()).backward()
            optimizer.step()
        del optimizer
        checkpointer.save(1, {"d": program.other, "g": program.model, "optimizer": program.of_other})
    assert "state['optimizer_2'] = program.adam." in said(caplog)[0]


def test_steps_are_observed_until_the_tenth_save_and_nothing_is_kept_alive(tmp_path: Path) -> None:
    found: list[ForgottenObjects] = []

    def observed(forgotten: ForgottenObjects) -> list[bool]:
        return [id(forgotten) in hooks._hooks for hooks in (AFTER_STEPS, PLATEAUS)]

    program = Program()
    optimizer = AdamW(program.model.parameters())
    gone = weakref.ref(optimizer)
    with Checkpointer(tmp_path, every=1) as checkpointer:
        [saver] = [each._forgotten for each in checkpointer._extensions.all if isinstance(each, Diagnostics)]
        for step in range(1, 12):
            program.model(torch.ones(2)).sum().backward()
            if step == 1:
                optimizer.step()
                del optimizer
                gc.collect()
                assert gone() is None
            program.adam.step()
            assert observed(saver) == [step <= 10, True]
            checkpointer.maybe_save(step, {"model": program.model, "optimizer": program.adam})
        found.append(saver)
    assert observed(found[0]) == [False, False]


RIGHT_ON_RANKS = "zero", "fsdp2"


def on_ranks(rank: int, world_size: int, root: str) -> dict[str, list[str]]:
    """What this rank logs in each case."""
    heard: dict[str, list[str]] = {}
    name = ""
    handler = logging.Handler()
    handler.emit = lambda record: heard[name].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER).addHandler(handler)
    mesh = init_device_mesh("cpu", (world_size,))
    for name in ("join", "rank 1", "zero", "fsdp2"):
        heard[name] = []
        torch.manual_seed(0)
        plain = torch.nn.Linear(2, 4)
        model: Any = fully_shard(plain, mesh=mesh) if name == "fsdp2" else DistributedDataParallel(plain)
        kind: Any = ZeroRedundancyOptimizer if name == "zero" else AdamW
        options = {"optimizer_class": AdamW} if name == "zero" else {}
        optimizer = kind(model.parameters(), lr=0.1, **options)
        state = {"model": model, "n": rank * 0}
        if name in RIGHT_ON_RANKS or (name == "rank 1" and rank == 0):
            state["optimizer"] = optimizer
        joined = stagereg.Join([model, optimizer]) if name == "join" else contextlib.nullcontext()
        with Checkpointer(f"{root}/{name}", every=1) as checkpointer, joined:
            for step in range(1, 4):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                checkpointer.maybe_save(step, state)
        dist.barrier()
    return heard


def test_one_rank_alone_names_what_is_forgotten_on_all_and_another_rank_what_it_alone_forgets(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, args=(str(tmp_path),))
    assert [name for name, found in first.items() if len(found) != (name not in (*RIGHT_ON_RANKS, "rank 1"))] == []
    assert [name for name, found in second.items() if len(found) != (name == "rank 1")] == []
    assert all("AdamW, which trains 'model'" in found[0] for found in (first["join"], second["rank 1"]))


SAME, MISSED = "in a row", "multiples of every=100 only"
STEPS: dict[str, tuple[list[int], bool, str]] = {
    "the step never grows": ([0] * 9, True, SAME),
    "the number of the epoch": ([1] * 5 + [2] * 5 + [3] * 5, True, SAME),
    "no optimizer of torch steps": ([7] * 1500, False, SAME),
    "one off": ([1, 101, 201, 301, 401], True, MISSED),
    "samples": (list(range(64, 2000, 64)), True, MISSED),
    "each step": (list(range(1, 500)), True, ""),
    "from zero on": (list(range(500)), True, ""),
    "once an epoch": (list(range(1, 90)), True, ""),
    "gradients are accumulated": ([each // 64 for each in range(20000)], False, ""),
    "twice a step": ([each // 2 for each in range(1, 900)], True, ""),
    "every tenth step": (list(range(0, 2000, 10)), True, ""),
    "every other multiple": (list(range(0, 2000, 200)), True, ""),
    "one multiple is skipped": ([*range(1, 100), *range(101, 400)], True, ""),
    "a resumed run": (list(range(151, 700)), True, ""),
    "two loops": ([*range(1, 50), *range(1, 50)], True, ""),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_that_are_not_saved_are_named_once(case: str, caplog: Any) -> None:
    given, stepped, expected = STEPS[case]
    looks, saved = GivenSteps(), None
    for step in given:
        looks.look(step, 100, saved, stepped)
        saved = step if step and step % 100 == 0 else saved
    assert [expected in text for text in said(caplog)] == [True] * bool(expected)


def test_steps_that_the_program_saves_itself_are_not_missed(caplog: Any) -> None:
    looks = GivenSteps()
    for step in range(1, 900, 33):
        looks.look(step, 100, step - 33, True)
    for step in range(1, 900, 33):
        looks.look(step, None, None, True)  # every=auto
    assert said(caplog) == []


@pytest.mark.parametrize(("given", "text"), [([3] * 9, SAME), ([1, 101, 201, 301], MISSED), ([1, 2, 3], "")])
def test_maybe_save_names_steps_that_are_not_saved(given: list[int], text: str, tmp_path: Path, caplog: Any) -> None:
    program = Program()
    with (
        caplog.at_level(logging.INFO, logger="stagereg"),
        Checkpointer(tmp_path, every=100) as checkpointer,
    ):
        for step in given:
            program.model(torch.ones(2)).sum().backward()
            program.adam.step()
            checkpointer.maybe_save(step, {"model": program.model, "optimizer": program.adam})
    assert [text in each for each in said(caplog)] == [True] * bool(text)
    [start] = [each for each in said(caplog, logging.INFO) if "reached no multiple of every=100" in each]
    assert start.endswith("would have lost all steps since its start.")
    assert (tmp_path / f"step-{given[-1]:08}").is_dir()
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="stagereg"),
        Checkpointer(tmp_path, every=1000) as checkpointer,
    ):
        state = {"model": program.model, "optimizer": program.adam}
        assert checkpointer.restore(state) == given[-1]
        checkpointer.maybe_save(given[-1] + 1, state)
    resumed = f"would have lost all steps since step {given[-1]}."
    assert [each.endswith(resumed) for each in said(caplog, logging.INFO) if "no multiple of" in each] == [True]


@pytest.mark.parametrize("where", ["state", "object", "nowhere", "unused"])
def test_a_sampler_whose_batches_are_taken_and_which_is_not_in_the_state_is_named(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    my_sampler = ResumableSampler(range(8))
    loader = torch.utils.data.DataLoader(range(8), sampler=my_sampler)  # type: ignore[arg-type]

    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return {"sampler": my_sampler.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            my_sampler.load_state_dict(state["sampler"])

    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    state |= {"state": {"data": my_sampler}, "object": {"holder": Holder()}}.get(where, {})
    with Checkpointer(str(tmp_path), every=1) as checkpointer:
        for step, _ in enumerate(loader if where == "unused" else my_sampler.batches(loader), 1):
            checkpointer.maybe_save(step, state)
    told = [text for text in caplog.messages if "ResumableSampler" in text]
    assert len(told) == (where == "nowhere")
    assert all("state['sampler'] = my_sampler. To silence" in text for text in told)
