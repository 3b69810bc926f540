"""``stagereg.main`` as a user runs it: scripts in a folder, started from a shell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from stagereg.base import record
from stagereg.base.machine import tunables

from ..support.app import MANY_CALLS, App
from ..support.programs import TORCHRUN, Program, await_gone, await_job, free_port, run

PROMPTLY_S = 20
"""Seconds on a busy machine; elastic's own default would be 30."""

SCRIPT = """
import json, logging, os, sys, time
import stagereg

log = logging.getLogger("train")


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    log.info("rank %d of %d sees %g", rank, size, total.item())
    stagereg.log(1, rank=rank)
    about = {
        "sum": total.item(), "lr": cfg.lr, "stamp": cfg.stamp, "cwd": os.getcwd(), "pid": os.getpid(),
        "parent": os.getppid(), "threads": os.environ.get("OMP_NUM_THREADS"), "main": __name__, "text": cfg.text,
        "libc": os.environ.get("GLIBC_TUNABLES"),
    }
    with open(os.path.join(cfg.answers, f"{rank}.json"), "a") as file:
        file.write(json.dumps(about) + "\\n")
    if cfg.what == "uneven":
        raise stagereg.UnevenInputsError(f"inputs ran out on rank {rank}", rank=rank if rank == 1 else None)
    if cfg.what == "fail_everywhere":
        raise stagereg.StageregError("no shelf for cheese")
    if cfg.what == "die_on_last":
        stagereg.base.record.emit("write", step=20, dir="kept")
        dist.barrier()
    if rank == size - 1:
        match cfg.what:
            case "raise_on_last":
                raise KeyError("no cheese")
            case "fail_on_last":
                raise stagereg.StageregError("the cheese is out: buy some")
            case "exit_on_last":
                sys.exit()
            case "exit_badly_on_last":
                sys.exit(3)
            case "exit_now_on_last":
                os._exit(3)
            case "go_on_last":
                os._exit(0)
            case "die_on_last":
                os.kill(os.getpid(), 9)
    if cfg.what in ("raise_on_last", "fail_on_last", "die_on_last", "exit_now_on_last", "go_on_last"):
        dist.all_reduce(total)
    if cfg.what == "hang":
        print("IN THE JOB", flush=True)
        if rank == 0:
            dist.all_reduce(total)
        time.sleep(600)
    return {"score": total.item() * cfg.lr}


if __name__ == "__main__":
    train()
    from torch.distributed import is_initialized
    print(f"end of the script in {os.getpid()}, a group is left: {is_initialized()}")
"""

CONFIG = """
nproc: 2
lr: 1.0
what: work
text: plain
answers: ???
stamp: ${now:%H-%M-%S.%f}
"""

CALLBACK = """
from hydra.experimental.callback import Callback


class WriteReturnValue(Callback):
    def __init__(self, file):
        self.file = file

    def on_job_end(self, config, job_return, **kwargs):
        with open(self.file, "a") as file:
            file.write(f"{job_return.return_value}\\n")
"""


CALL = """
import os, sys
from omegaconf import OmegaConf
from train import train

sys.argv = ["train.py", "--no-such-flag"]
os.mkdir("in the call")
cfg = OmegaConf.create(dict(lr=3, what="work", text="", stamp="", answers="in the call"))
print([train(cfg), train(cfg)])
"""


@pytest.fixture
def app(tmp_path):
    (tmp_path / "write.py").write_text(CALLBACK)
    return Program(tmp_path, CONFIG, SCRIPT)


LINES = {
    **{f"nproc={value}": [f"nproc={value}"] for value in ("500", "0", "two", "1.5")},
    "an error of Hydra's": ["~nope"],
    "an unknown key": ["npro=1"],
    "one rank": ["nproc=1"],
    "an error of ours": ["nproc=1", "what=fail_on_last"],
    "another error": ["nproc=1", "what=raise_on_last"],
}


CORES = rf"this machine has {os.cpu_count()} cores.*\n"
NPROC = r"stagereg: nproc must be a whole number in 1\.\.\d+, not "
ERRORS = {
    "an error of ours": "rank 0: the cheese is out: buy some\n",
    "another error": r"(?s)rank 0: Traceback.*\nKeyError: 'no cheese'\n",
    "an error of Hydra's": r"(?s).*Could not delete from config\. 'nope' does not exist\..*",
    "an unknown key": r"stagereg: the config takes no 'npro'\. Did you mean 'nproc'\? It takes: .*\n",
    **{
        f"nproc={value}": rf"stagereg: nproc must be a whole number in 1..\d+, not {value}: {CORES}"
        for value in ("500", "0", "two", "1.5")
    },
}


def called(app):
    """Return the end of each command line and the answers of its rank; all run in one process."""
    (app.folder / "call.py").write_text(CALL)
    calls = []
    for number, line in enumerate(LINES.values()):
        (app.answers / str(number)).mkdir()
        calls.append(["train.py", [*line, f"answers={app.answers}/{number}", f"hydra.run.dir=runs/{number}"]])
    done = run([sys.executable, MANY_CALLS], app.folder, given=json.dumps([*calls, ["call.py", []]]))
    assert done.returncode == 0, done.stderr
    results = {}
    for number, (name, (_, code, out, err)) in enumerate(zip([*LINES, "a call"], json.loads(done.stdout), strict=True)):
        answers = {file.stem: json.loads(file.read_text()) for file in (app.answers / str(number)).glob("*")}
        folders = list((app.folder / "runs" / str(number)).rglob(".hydra"))
        results[name] = {"returncode": code, "stdout": out, "stderr": err, "answers": answers, "folders": folders}
    return results


def test_plain_python_starts_ranks_that_share_folder_and_log(app):
    # Ranks above 0 have no logging whose level could be overridden; what only the parent uses does not reach them.
    of_parent = ["hydra/launcher=joblib", "hydra.sweep.dir=x"]
    ended = app.run("text='a $$ {b} ${lr}'", "lr=2", "hydra.job_logging.root.level=DEBUG", *of_parent)
    folder = of_one_run(app, ended)
    first, second = app.answer(0), app.answer(1)
    assert first["pid"] != second["pid"]
    assert first["threads"] == second["threads"] == "1"
    assert first["libc"] == second["libc"] == tunables({}).get("GLIBC_TUNABLES")
    assert first["text"] == second["text"] == "a $$ {b} 2"
    assert "lr=2" in (folder / ".hydra" / "overrides.yaml").read_text()
    assert ended.stderr == ""


def of_one_run(app, ended):
    """The folder of a run of two ranks that has ended well."""
    assert ended.returncode == 0, ended.stderr
    first, second = app.answer(0), app.answer(1)
    assert first["sum"] == second["sum"] == 3
    assert first["stamp"] == second["stamp"]
    (folder,) = app.run_folders()
    (log,) = app.folder.rglob("*.log")
    assert re.findall("rank (.*) sees 3", log.read_text()) == ["0 of 2"]
    return folder


def test_one_rank_runs_in_the_process_itself_and_its_error_is_printed_once(app):
    ends = called(app)
    ended = ends["one rank"]
    assert ended["returncode"] == 0, ended["stderr"]
    assert ended["answers"]["0"]["sum"] == 1
    assert ended["answers"]["0"]["threads"] is None
    pid = ended["answers"]["0"]["pid"]
    assert f"end of the script in {pid}, a group is left: False" in ended["stdout"]
    assert len(ended["folders"]) == 1
    assert ends["a call"]["stdout"].splitlines()[-1] == str([{"score": 3.0}] * 2), "a config in the call"
    for name, stderr in ERRORS.items():
        assert ends[name]["returncode"] == 1
        assert re.fullmatch(stderr, ends[name]["stderr"]), ends[name]["stderr"]
        assert ends[name]["stderr"].count("Traceback") == (name == "another error")
        assert name in ("an error of ours", "another error") or ends[name]["answers"] == {}


@pytest.mark.slow
def test_ranks_of_torchrun_share_folder_and_log(app):
    of_one_run(app, app.run("nproc=7", start=TORCHRUN))


def test_jobs_of_a_sweep_get_fresh_ranks_and_return_once(app):
    callback = ["+hydra.callbacks.write._target_=write.WriteReturnValue", "+hydra.callbacks.write.file=values.txt"]
    ended = app.run("-m", "nproc=2,1", "lr=2", *callback)
    assert ended.returncode == 0, ended.stderr
    first, second, alone = app.answer(0, 0), app.answer(1), app.answer(0, 1)
    assert [each["sum"] for each in (first, second, alone)] == [3, 3, 1]
    assert len({each["pid"] for each in (first, second, alone)}) == 3
    assert first["parent"] == second["parent"] == alone["parent"], "also a single rank is started by the program"
    assert (app.folder / "values.txt").read_text() == "{'score': 6.0}\n{'score': 2.0}\n"
    assert len(app.run_folders()) == len(list(app.folder.rglob("train.log"))) == 2
    # Each rank has recorded its job to the end, in the job's directory.
    files = [f"0/{record.file_name(0)}", f"0/{record.file_name(1)}", f"1/{record.file_name(0)}"]
    recorded = sorted(app.folder.rglob(record.FILES))
    found = [[json.loads(line) for line in file.read_text().splitlines()] for file in recorded]
    assert ["/".join(file.parts[-2:]) for file in recorded] == files
    assert [[line["event"] for line in lines] for lines in found] == [["start", "log", "end"]] * 3
    ranks = [(lines[0]["pid"], lines[0]["rank"], lines[0]["world_size"]) for lines in found]
    assert ranks == [(first["pid"], 0, 2), (second["pid"], 1, 2), (alone["pid"], 0, 1)]
    assert [lines[1]["values"]["rank"] for lines in found] == [0, 1, 0]
    assert [lines[2]["status"] for lines in found] == ["completed"] * 3


@pytest.mark.parametrize("start", [None, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["python", "torchrun"])
def test_an_error_is_printed_once_without_its_consequences(app, start):
    ended = app.run("what=raise_on_last", start=start)
    assert ended.returncode == 1
    assert ended.stderr.count('no cheese")') == 1  # the source line of the traceback
    assert ended.stderr.count("KeyError: 'no cheese'") == 1
    assert len(re.findall(r"^rank \d+: ", ended.stderr, re.MULTILINE)) == 1
    assert "rank 1: Traceback" in ended.stderr
    assert "peer" not in ended.stderr


NEWEST = "The newest checkpoint is step 20, in kept. To resume, run the same command."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "stderr"),
    [
        ("fail_on_last", 1, "rank 1: the cheese is out: buy some\n"),
        ("fail_everywhere", 1, "rank [01]: no shelf for cheese\n"),
        ("uneven", 1, "rank 1: inputs ran out on rank 1\n"),
        ("die_on_last", 1, f"rank 1: killed by SIGKILL\n{NEWEST}\n"),
        ("exit_badly_on_last", 1, r"rank 1: called sys\.exit\(3\)\n"),
        ("exit_on_last", 0, ""),
        ("exit_now_on_last", 1, "rank 1: exited with code 3\n"),
        (
            "go_on_last",
            1,
            r"(?s)rank 0: rank 1 failed \(process \d+ on .+\): .* has terminated\. Error on this rank:\n.*",
        ),
    ],
)
def test_the_cause_is_one_line(app, what, code, stderr):
    ended = app.run(f"what={what}")
    assert ended.returncode == code
    assert re.fullmatch(stderr, ended.stderr)


def test_a_failed_job_ends_the_sweep_with_its_error_once(app):
    ended = app.run("-m", "lr=1", "what=fail_everywhere", "nproc=1")
    assert ended.returncode == 1
    assert re.fullmatch(r"Error executing job.*\nrank [01]: no shelf for cheese\n", ended.stderr)


@pytest.mark.slow
def test_folders_and_configs_are_found_from_anywhere(app, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, os.path.relpath(app.folder / "train.py", elsewhere), f"answers={app.answers}"]
    ended = run([*command, "hydra.job.chdir=true"], elsewhere)
    assert ended.returncode == 0, ended.stderr
    (folder,) = (path.parent for path in elsewhere.rglob(".hydra"))
    assert app.answer(0)["cwd"] == app.answer(1)["cwd"] == str(folder)
    # A module of a package:
    App(app.folder, {"pkg/__init__.py": "", "pkg/conf/__init__.py": "", "pkg/conf/app.yaml": CONFIG})
    (app.folder / "train.py").rename(app.folder / "pkg" / "train.py")
    ended = run([sys.executable, "-m", "pkg.train", f"answers={app.answers}"], app.folder)
    assert ended.returncode == 0, ended.stderr
    assert len(app.answers_of(1)) == 2


@pytest.mark.parametrize(
    ("name", "to_group", "arguments", "code"),
    [
        pytest.param("SIGINT", True, [], 130, marks=pytest.mark.slow),
        pytest.param("SIGINT", True, ["-m", "lr=1,2"], 130, marks=pytest.mark.slow),
        ("SIGINT", False, ["nproc=1"], 130),
        pytest.param("SIGTERM", False, [], 75, marks=pytest.mark.slow),
        pytest.param("SIGKILL", False, [], -9, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_ranks_promptly(app, name, to_group, arguments, code):
    ranks = 1 if "nproc=1" in arguments else 2
    command, pipes = app.command(*arguments, "what=hang"), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=app.folder, text=True, start_new_session=True, **pipes) as parent:
        try:
            await_job([parent], ranks)
            (os.killpg if to_group else os.kill)(parent.pid, getattr(signal, name))
            _, stderr = parent.communicate(timeout=PROMPTLY_S)
        finally:
            parent.kill()
    assert parent.returncode == code
    before = "preempted by SIGTERM before the first step: no step is lost. To continue, run the same command.\n"
    lines = {"SIGKILL": "", "SIGTERM": before}
    assert stderr == lines.get(name, f"stopped by {name}\n")
    assert await_gone(*(app.answer(rank)["pid"] for rank in range(ranks)))
    assert len(app.answers_of(0)) == 1


# Starts a rank that waits for the others at a port where nothing listens.
STARTER = """
import os, subprocess, sys

if sys.argv[1] == "stagereg":
    os.environ["STAGEREG_LAUNCHER"] = str(os.getpid())
else:
    os.environ["TORCHELASTIC_RUN_ID"] = "run"
subprocess.run([sys.executable, "-c", sys.argv[2]])
"""
WAITING = """
import os
import stagereg.launch.rank as rank

end_with = rank.end_with
rank.end_with = lambda parent: (end_with(parent), print(os.getpid(), flush=True))
rank.Rank.current()
"""


@pytest.mark.parametrize("starter", ["stagereg", "torchrun"])
def test_a_rank_that_waits_for_others_ends_with_its_parent(starter):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command, env = [sys.executable, "-c", STARTER, starter, WAITING], {**os.environ, **variables}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            rank = int(parent.stdout.readline())
            parent.kill()
            assert await_gone(rank)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
