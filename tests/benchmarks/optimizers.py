"""Every optimizer that can be made here: whether a run that was saved and restored is the run that was not interrupted.

Six steps, a save, a new program, a restore, six more steps; parameters and state are compared bit for bit with those of
twelve steps, and with those after torch's save and load of ``state_dict()`` in place of the restore. Optimizers of
torch, and of ``pytorch_optimizer``, ``torchao`` and ``bitsandbytes`` where these are installed. Run it as
``python -m tests.benchmarks.optimizers --ranks 2``; exit code 1 if one is restored otherwise without an error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import itertools
import logging
import operator
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_flatten_with_path

from stagereg.assembly import Checkpointer, Preemption
from stagereg.errors import StageregError, reason
from stagereg.testing import run_ranks

LIBRARIES = {"torch": "torch.optim", "pytorch_optimizer": "pytorch_optimizer"}
LIBRARIES |= {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
HALF = 6
OUTCOMES = [
    "SILENT",
    "refused without a name",
    "refused at restore",
    "refused at save",
    "as load_state_dict",
    "not with torch either",
    "equal",
]
"""What may come of an optimizer; of several ranks the first in this order counts."""


class Run:
    """A program: a model, and an optimizer of a class."""

    def __init__(self, kind: Any, ranks: int, rank: int, ways: dict[str, bool]) -> None:
        seed(0)
        self.rank, self._ways = rank, ways
        self.module = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 4))
        self.model: Any = DistributedDataParallel(self.module) if ranks > 1 else self.module
        self.optimizer = made(kind, self.module, ways["matrices"])

    def train(self, first: int) -> None:
        for step in range(first, first + HALF):
            seed(step)
            inputs = torch.randn(2, 8, 32)[self.rank % 2]
            self.module.train()
            getattr(self.optimizer, "train", lambda: None)()

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = (self.model(inputs) - 1).square().mean()
                loss.backward(create_graph=self._ways["graph"])
                return loss

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self._ways["closure"]:
                    self.optimizer.step(closure)
                else:
                    closure()
                    self.optimizer.step()

    def load(self, stream: io.BytesIO) -> None:
        stream.seek(0)
        module, optimizer = torch.load(stream, weights_only=False)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)

    def state(self) -> list[Any]:
        """All that it has, to be compared."""
        pairs, _ = tree_flatten_with_path((self.module.state_dict(), self.optimizer.state_dict()))
        return sorted(((keystr(path), shown(x)) for path, x in pairs), key=operator.itemgetter(0))


def seed(step: int) -> None:
    torch.manual_seed(step)
    random.seed(step)


def shown(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__, repr(x)
    if hasattr(x, "__tensor_flatten__"):
        names, context = x.__tensor_flatten__()
        return type(x).__name__, str(context), [shown(getattr(x, name)) for name in names]
    data = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x
    return type(x).__name__, x.dtype, x.shape, x.stride(), data.numpy().tobytes()


def made(kind: Any, module: torch.nn.Module, matrices: bool) -> Any:
    """Build an optimizer by the names of what it takes; of ``matrices`` alone, in such a group, as Muon wants it."""
    params: Any = [*module.parameters()]
    if matrices:
        params = [{"params": [x for x in params if x.ndim > 1], "use_muon": True}]
        params = params if "use_muon" in inspect.getsource(inspect.getmodule(kind)) else params[0]["params"]
    sgd = torch.optim.SGD
    given = {
        "params": params,
        "model": module,
        "base_optimizer": sgd,
        "num_iterations": 100,
        "lr": 0.01,
        "momentum": 0.9,
    }
    given |= {"optimizer": torch.optim.AdamW(params, lr=0.01), "num_data": 8, "max_iter": 2}
    given |= {"tolerance_change": 0, "rho_scheduler": None}
    signature = inspect.signature(kind.__init__).parameters
    needed = [name for name, each in signature.items() if each.default is each.empty]
    wanted = {*needed, "max_iter", "tolerance_change", "momentum"} & signature.keys() & given.keys()
    return kind(**{name: given[name] for name in wanted})


def ways_of(kind: Any, ranks: int, rank: int) -> dict[str, bool] | str:
    """Return how its steps are taken; if it takes none here, why."""
    failures = ""
    for matrices, graph, closure in itertools.product((False, True), (False, True), (True, False)):
        ways = {"graph": graph, "closure": closure, "matrices": matrices}
        try:
            Run(kind, ranks, rank, ways).train(0)
        except Exception as error:
            failures = failures or reason(error)[:80]
        else:
            return ways
    return failures


def outcome(kind: Any, ranks: int, rank: int, root: str) -> tuple[str, str]:
    """Return what comes of an optimizer, and more about it."""
    ways = ways_of(kind, ranks, rank)
    if isinstance(ways, str):
        return "not with torch either", f"takes no step: {ways}"
    first, plain, again = (Run(kind, ranks, rank, ways) for _ in range(3))
    first.train(0)
    stream = io.BytesIO()
    torch.save([first.module.state_dict(), first.optimizer.state_dict()], stream)
    refused = attempt(lambda: saved(root, first))
    first.train(HALF)
    failed = attempt(lambda: plain.load(stream)) or attempt(lambda: plain.train(HALF))
    if refused:
        return "refused at save" if "'optimizer" in refused else "refused without a name", refused
    if refused := attempt(lambda: restored(root, again)):
        return "not with torch either" if failed else "refused at restore", refused
    if broken := attempt(lambda: again.train(HALF)):
        return "not with torch either" if failed else "SILENT", broken
    expected, found = first.state(), again.state()
    if expected == found:
        return "equal", "load_state_dict is not" if failed or plain.state() != expected else ""
    if failed or plain.state() == found:
        return "not with torch either" if failed else "as load_state_dict", failed
    return "SILENT", f"{sum(a != b for a, b in zip(expected, found, strict=False))} of {len(expected)} values differ"


def attempt(do: Callable[[], object]) -> str:
    """Return the text of what it raises, if something."""
    try:
        do()
    except StageregError as error:
        return str(error) or type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saved(root: str, run: Run) -> None:
    with Checkpointer(root, preemption=Preemption(grace_period=None)) as checkpointer:
        checkpointer.save(HALF, {"model": run.model, "optimizer": run.optimizer})


def restored(root: str, run: Run) -> None:
    with Checkpointer(root, preemption=Preemption(grace_period=None)) as checkpointer:
        checkpointer.restore({"model": run.model, "optimizer": run.optimizer})


def kinds(library: str) -> Iterator[tuple[str, Any]]:
    """Yield the classes of optimizers in a library, by name."""
    torch.compile = lambda function=None, **_: function or (lambda each: each)  # type: ignore[assignment]
    try:
        module = importlib.import_module(LIBRARIES[library])
    except ImportError:
        return
    for name, kind in sorted(vars(module).items()):
        is_optimizer = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
        if is_optimizer and name not in ("Optimizer", "BaseOptimizer"):
            yield f"{library}.{name}", kind


def measure(rank: int, ranks: int, roots: dict[str, str], only: str) -> dict[str, tuple[str, str]]:
    """Return what comes of each optimizer."""
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = [each for library in roots for each in kinds(library) if only in each[0]]
        return {name: outcome(kind, ranks, rank, f"{roots[name.split('.')[0]]}/{name}") for name, kind in found}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", default="", help="a part of the name, such as torch.AdamW")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        given = (dict.fromkeys(LIBRARIES, root), options.only)
        alone = options.ranks == 1
        each = [measure(0, 1, *given)] if alone else run_ranks(measure, 2, args=given, timeout_s=1500)
    rows = {name: min((one[name] for one in each), key=lambda row: OUTCOMES.index(row[0])) for name in each[0]}
    for name, (what, more) in sorted(rows.items(), key=lambda row: (OUTCOMES.index(row[1][0]), row[0])):
        print(f"{what:22} {name:40} {' '.join(more.split())[:150]}")
    print(dict(Counter(what for what, _ in rows.values())))
    return int(any(what == "SILENT" for what, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
