"""Checkpoints of healthy trainers are proven, also after kills; a proof changes no file; a faulty resume is refuted."""

from __future__ import annotations

import json
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..support.programs import TORCHRUN, run

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PROVE = "prove=stagereg.Prove(steps=3)"
DEATH = """import os, signal, stagereg
AT = int(os.environ.get("KILLED_AT", "0"))
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""
"""Is added below the imports of a program."""


@dataclass(frozen=True)
class Trained:
    """An example of a trainer, with replacements of its text."""

    trainer: str
    arguments: tuple[str, ...]
    saved: str  # the directory of checkpoints to prove, or a pattern
    edits: tuple[tuple[str, str], ...]
    ranks: int = 1

    def write(self, folder: Path) -> list[str]:
        """Write the program, and return its command."""
        pytest.importorskip(self.trainer, reason="make frameworks installs it")
        text = (EXAMPLES / f"{self.trainer}_train.py").read_text()
        *_, last = re.finditer(r"^(?:from|import) .*\n", text, re.M)
        text = text[: last.end()] + DEATH + text[last.end() :]
        for old, new in self.edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "train.py").write_text(text)
        start = [sys.executable] if self.ranks == 1 else [*TORCHRUN[:-1], str(self.ranks)]
        return [*start, "train.py", *self.arguments]


def accelerate(every: int, ranks: int, *edits: tuple[str, str]) -> Trained:
    option = ("join=True)", f"join=True, {PROVE})")
    death = (
        "accelerator.backward(loss)",
        "accelerator.backward(loss)\n                AT and AT == progress.batch + 100 * epoch and die()",
    )
    arguments = "--dir=out/a", "--epochs=3", f"--every={every}"
    return Trained("accelerate", arguments, "out/a", (option, death, *edits), ranks)


def lightning(more: str, ranks: int, *edits: tuple[str, str]) -> Trained:
    option = ("StageregCheckpointIO()", f"StageregCheckpointIO({PROVE})")
    dropout = ("torch.nn.BatchNorm1d(16)", "torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2)")
    saves = ('monitor="val_loss", save_top_k=2, save_last=True', "every_n_train_steps=5, save_top_k=-1, save_last=True")
    death = ("Tensor:\n        x, y", "Tensor:\n        AT and AT == self.global_step and die()\n        x, y")
    order = ("keepdim=True)), batch_size=4", f"keepdim=True)), {more}")
    arguments = "--dir=out", "--epochs=3", f"--ranks={ranks}"
    return Trained("lightning", arguments, "out/last.ckpt", (option, dropout, saves, death, order, *edits), ranks)


def transformers(ranks: int, *edits: tuple[str, str]) -> Trained:
    option = ("callbacks=[StageregCallback()]", f"callbacks=[StageregCallback({PROVE}), Killing()], save_total_limit=9")
    begin = "def on_step_begin(self, args, state, *_, **__): AT and AT == state.global_step and die()"
    killing = f"class Killing(TrainerCallback):\n    {begin}\n"
    edits = (("Trainer, TrainingArguments", "Trainer, TrainerCallback, TrainingArguments"), *edits)
    death = ("class Sentences", f"{killing}\nclass Sentences")
    return Trained("transformers", ("--output-dir=out",), "out/checkpoints", (option, death, *edits), ranks)


def torchtitan(*edits: tuple[str, str]) -> Trained:
    option = ("last_save_model_only=False", 'last_save_model_only=False, checkpoint_options={"prove": {"steps": 3}}')
    death = ("        progress.step = step\n", "        progress.step = step\n        AT and AT == step and die()\n")
    return Trained("torchtitan", ("--dir=out", "--steps=13"), "out/checkpoint", (option, death, *edits), 2)


ACCUMULATED = ("logger=False,", 'logger=CSVLogger("out", version=0), accumulate_grad_batches=2, log_every_n_steps=1,')
LOGGED = (
    "from torch.utils.data import",
    "from lightning.pytorch.loggers import CSVLogger\nfrom torch.utils.data import",
)
EVALUATED = '"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"'
BEST = ('"logging_steps": 1', f'"logging_steps": 1, {EVALUATED}')
TWO = '"gradient_accumulation_steps": 2'
HEALTHY = {
    "accelerate": accelerate(4, 1),
    "accelerate with uneven ranks": accelerate(5, 2),
    "Lightning with a logger and accumulation": lightning("batch_size=4, shuffle=True", 1, ACCUMULATED, LOGGED),
    "Lightning with DDP": lightning("batch_size=2, shuffle=True", 2),
    "Trainer with evaluations": transformers(1, BEST),
    "Trainer with DDP and accumulation": transformers(2, ('"warmup_steps"', f'{TWO}, "warmup_steps"')),
    "torchtitan": torchtitan(),
}
UNSAVED = (
    "scheduler, batches = accelerator.prepare(module, adamw, schedule, loader)",
    "batches = accelerator.prepare(module, adamw, loader)\n    scheduler = schedule",
)
OWN_ORDER = "batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(os.getpid())"
FAULTS = {
    "a scheduler that accelerate does not save": (accelerate(4, 1, UNSAVED), "schedule"),
    "an order of data that Lightning does not save": (lightning(OWN_ORDER, 1), "data"),
    "samples of the Trainer that differ in each process": (
        transformers(1, ("manual_seed(7)", "manual_seed(os.getpid())")),
        "data",
    ),
    "torchtitan's loader left out": (
        torchtitan(("enable=True", 'enable=True, exclude_from_loading=["dataloader"]')),
        "random numbers",
    ),
}


def listing(folder: Path) -> dict[str, Any]:
    """Return each file outside of records of proofs, with its time, size and number."""
    found = {}
    for path in folder.rglob("*"):
        if "proofs" not in path.parts:
            about = path.lstat()
            found[str(path)] = None if path.is_dir() else (about.st_mtime_ns, about.st_size, about.st_ino)
    return found


def prove(folder: Path, saved: str, command: list[str]) -> dict[str, Any]:
    """Prove the newest checkpoint, and return the verdict."""
    before = listing(folder / "out")
    start = [sys.executable, "-m", "stagereg", "prove", saved, "--json", "--timeout=90", "--"]
    done = run([*start, *command], folder, **VARIABLES)
    assert listing(folder / "out") == before
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout)["checkpoints"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_trainer_that_was_killed_twice_is_proven_and_a_proof_changes_no_file(name: str, tmp_path: Path) -> None:
    trained = HEALTHY[name]
    command = trained.write(tmp_path)
    for at in (7, 9) if trained.trainer != "accelerate" else (6, 107):
        done = run(command, tmp_path, KILLED_AT=str(at), **VARIABLES)
        assert done.returncode in (1, -signal.SIGKILL), done.stderr
    done = run(command, tmp_path, **VARIABLES)
    assert done.returncode == 0, done.stderr
    verdict = prove(tmp_path, trained.saved, command)
    assert (verdict["verdict"], verdict["why"]) == ("proven", ""), verdict
    assert verdict["steps"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_resume_of_a_trainer_is_refuted(name: str, tmp_path: Path) -> None:
    trained, kind = FAULTS[name]
    command = trained.write(tmp_path)
    done = run(command, tmp_path, **VARIABLES)
    assert done.returncode == 0, done.stderr
    verdict = prove(tmp_path, trained.saved, command)
    assert (verdict["verdict"], verdict["first"]["kind"]) == ("refuted", kind), verdict


def test_fabric_does_not_take_prove() -> None:
    lightning = pytest.importorskip("lightning", reason="make frameworks installs it")
    import stagereg
    from stagereg.errors import ConfigError
    from stagereg.integrations.lightning import StageregCheckpointIO

    plugin = StageregCheckpointIO(prove=stagereg.Prove(steps=3))
    with pytest.raises(ConfigError, match="not with Fabric"):
        lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
