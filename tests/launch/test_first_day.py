"""What a user does wrong on the first day, and how a run says where to go on: messages, and the seconds until then."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ..support.app import App

JOIN_TIMEOUT_S = 100
"""Within which each message comes, on a busy machine too."""

TRAIN = """
import os, signal, time
import stagereg

LENGTHS = 40, 25, 33  # batches of each rank


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch
    import torch.distributed as dist

    rank, size, what = dist.get_rank(), dist.get_world_size(), cfg.what
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    state, start = {"model": model, "optimizer": optimizer}, 0
    if what == "restore alone" and rank > 0:
        from hydra.core.hydra_config import HydraConfig
        log = os.path.join(HydraConfig.get().runtime.output_dir, "app.log")
        while "constructed a Checkpointer" not in open(log).read():  # rank 0 waits, and says so
            time.sleep(0.05)
    began = time.monotonic()
    try:
        join = stagereg.instantiate(cfg.join, model=model, optimizer=optimizer)
        with stagereg.instantiate(cfg.checkpoint) as checkpointer:
            if what != "restore alone" or rank == 0:
                start = checkpointer.restore(state) or 0
            with join:
                end = LENGTHS[rank] if what == "uneven" else cfg.steps
                for step in range(start + 1, end + 1):
                    model(torch.ones(4, 8)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if what == "save alone" and rank == 0 and step % 10 == 0:
                        checkpointer.save(step, state)
                    elif what != "save alone":
                        checkpointer.maybe_save(step, state)
                    if "interrupt" in what and step == 22:
                        checkpointer.wait()
                        if rank > 0:  # rank 0 waits for it in a collective
                            signal.signal(signal.SIGINT, signal.SIG_IGN)
                        if rank == size - 1:
                            print("interrupted at", time.time(), flush=True)
                            os.kill(int(os.environ["FORKED_BY"]), signal.SIGINT)
                            time.sleep(600 if rank > 0 else 0)
    finally:
        print(f"rank {rank} left after {time.monotonic() - began:.1f} s\\n", end="", flush=True)


if __name__ == "__main__":
    train()
"""
CONFIG = """
nproc: 1
what: work
steps: 25
checkpoint: {every: 10, keep: 9}
"""
DEFAULTS = f"defaults: [stagereg, _self_]\njoin: {{timeout: {JOIN_TIMEOUT_S}}}\n"
NONE = "This run has no complete checkpoint in RUN/checkpoints yet."
BEGINS = "checkpoints go to RUN/checkpoints; training starts from scratch"
ANEW = "The same command would start from scratch in a new directory. To resume, run the same command with "


def newest(step: int, goes_on: str = f"{ANEW}checkpoint.dir=RUN/checkpoints.") -> str:
    return f"The newest valid checkpoint is step {step}, in RUN/checkpoints. {goes_on}"


def app_in(folder: Path) -> App:
    return App(folder, {"conf/app.yaml": DEFAULTS + CONFIG, "conf/bare.yaml": CONFIG, "app.py": TRAIN})


def shown(text: str) -> list[str]:
    """Its lines without times, and with RUN for the directory of the run."""
    return re.sub(r"/\S*/outputs/[-\w]+/[-\w]+", "RUN", re.sub(r"(?m)^\[[-\d]+ .*?\]", "", text)).splitlines()


SAVE_ALONE = f"""\
rank N: Step 10 was not saved: rank 0 called save(step 10), ranks 1, 2 did not: call save and maybe_save on all ranks, \
with an empty batch too, and not under `if rank == 0`. {NONE}"""
RESTORE_ALONE = """\
rank N: Nothing was restored from RUN/checkpoints: rank 1 did not call restore(), which all ranks must call; rank 2 \
did not call restore(), which all ranks must call"""
MADE_ALONE = "rank 0 constructed a Checkpointer, but ranks 1, 2 did not. Construct it on all ranks."
INTERRUPT = """\
stopped by SIGINT
The newest checkpoint is step 20, in RUN/checkpoints. To resume, run the same command with \
checkpoint.dir=RUN/checkpoints."""


@pytest.mark.parametrize(
    ("what", "code", "error", "logged"),
    [
        pytest.param("uneven", 0, "", newest(40), marks=pytest.mark.slow),
        pytest.param("save alone", 1, SAVE_ALONE, BEGINS, marks=pytest.mark.slow),
        pytest.param("restore alone", 1, RESTORE_ALONE, MADE_ALONE, marks=pytest.mark.slow),
        pytest.param("interrupt", 130, INTERRUPT, BEGINS, marks=pytest.mark.slow),
    ],
    ids=["uneven", "save", "restore", "interrupt"],
)
def test_ranks_that_differ_save_or_say_so_in_seconds(
    tmp_path: Path, what: str, code: int, error: str, logged: str
) -> None:
    steps = 400 if what == "save alone" else 25
    ended = app_in(tmp_path).fork("nproc=3", f"what={what}", f"steps={steps}")
    seconds = [float(each) for each in re.findall(r"left after ([\d.]+) s", ended.stdout)]
    seconds += [time.time() - float(each) for each in re.findall(r"interrupted at ([\d.]+)", ended.stdout)]
    assert ended.returncode == code, ended.stderr
    last = [re.sub("^rank [012]:", "rank N:", line) for line in shown(ended.stderr)]
    assert last[-len(error.splitlines()) :] == error.splitlines()
    assert any(line.endswith(f" - stagereg: {logged}") for line in shown(ended.stdout)), ended.stdout
    assert 0 < max(seconds) < JOIN_TIMEOUT_S
    if code == 0:
        (latest,) = tmp_path.rglob("latest")
        names = [f"step-{step:08}" for step in (10, 20, 30, 40)]
        assert sorted(path.name for path in latest.parent.iterdir()) == ["latest", *names]


NO_JOIN = "to train without a join, write join.enable=false"
NO_SAVE = "to train without checkpoints, write checkpoint.enable=false"
NO_PARTS = "checkpoints need a stager and a storage; to train without checkpoints, write checkpoint.enable=false"
GONE = "checkpoint cannot be resolved: Interpolation key"
BARE = "the config has no key 'join'. Begin the config with `defaults: [stagereg, _self_]`; or"
SWITCHED = {
    "join=null": f"stagereg: {NO_JOIN}",
    "checkpoint=null": f"stagereg: {NO_SAVE}",
    "stager=null": f"stagereg: {NO_PARTS}",
    "storage=null": f"stagereg: {NO_PARTS}",
    "~join": f"rank 0: the config has no component for 'join'; {NO_JOIN}.",
    "~checkpoint": f"rank 0: the config has no component for 'checkpoint'; {NO_SAVE}.",
    "~stager": f"rank 0: {GONE} 'stager' not found. {NO_PARTS}",
    "~storage": f"rank 0: {GONE} 'storage' not found. {NO_PARTS}",
    "--config-name=bare": f"rank 0: {BARE} {NO_JOIN}",
}
"""What a command line ends with that switches something off in another way than by ``enable``."""


GOES_ON = {
    "hydra.run.dir=outputs/1/${now:a}": (0, [BEGINS, newest(25)]),
    "hydra.run.dir=outputs/1/${now:b} checkpoint.dir=outputs/1/a/checkpoints": (
        0,
        [
            "checkpoints go to RUN/checkpoints; resumed from RUN/checkpoints/step-00000025",
            "NO STEP WAS TAKEN: this run resumed from step 25, in RUN/checkpoints/step-00000025, and had no steps "
            "left. To train from scratch, give the run another directory, checkpoint.dir=PATH, or add "
            "checkpoint.resume=never. To train longer, give the run more steps.",
        ],
    ),
    "hydra.run.dir=outputs/1/${now:b} checkpoint.dir=outputs/1/a/checkpoints steps=26": (
        0,
        [
            "checkpoints go to RUN/checkpoints; resumed from RUN/checkpoints/step-00000025",
            newest(26, "The same command resumes from there, if it has more steps to take."),
        ],
    ),
    "hydra.run.dir=outputs/2/${now:a} what=interrupt": (130, [BEGINS, f"interrupted. {newest(20)}"]),
    "hydra.run.dir=outputs/3/1 checkpoint.enable=false join.enable=false": (0, []),
}
"""How one process ends, and its lines on checkpoints, from each of these command lines after those before it."""


@pytest.mark.slow
def test_one_process_says_what_to_write_and_how_to_go_on(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    ended = app.run_many([("app.py", line.split()) for line in (*SWITCHED, *GOES_ON)])
    for done, (line, text) in zip(ended, SWITCHED.items(), strict=False):
        assert (done.returncode, done.stderr) == (1, f"{text}\n"), line
    for done, (line, (code, expected)) in zip(ended[len(SWITCHED) :], GOES_ON.items(), strict=True):
        lines = [text.partition(" - stagereg: ")[2] for text in shown(done.stdout)]
        assert [text for text in lines if text and "no accelerator" not in text] == expected, (line, done)
        assert (done.returncode, done.stderr) == (code, "stopped by SIGINT\n" if code else ""), line
        assert float(re.findall(r"left after ([\d.]+) s", done.stdout)[0]) < JOIN_TIMEOUT_S
    assert not (tmp_path / "outputs" / "3" / "1" / "checkpoints").exists()
