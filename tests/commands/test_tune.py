"""``stagereg tune`` as a user runs it: a script, a command line, and what it prints in the end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stagereg.cli import main
from stagereg.sweep.result import results
from stagereg.sweep.study import Study

PROGRAM = """
import json, os, sys, threading

overrides = [text for text in sys.argv[1:] if "=" in text]
given = dict(text.lstrip("+").split("=", 1) for text in overrides)
CONFIG = '''
hydra:
  runtime:
    choices:
      stager: pinned_cached
      data: even
      hydra/launcher: basic
stager:
  _target_: stagereg.stagers.pinned_cached.PinnedCachedStager
  max_in_flight: 2
  threads: 2
checkpoint:
  dir: {dir}
  every: 40
lr: 0.5
steps: 100
text: plain
'''
if "broken" in given:
    sys.exit("Could not override 'broken'.")
if "--cfg" in sys.argv:
    print("a script may print")
    print(CONFIG.replace("{dir}", given.get("checkpoint.dir", "${hydra:runtime.output_dir}/checkpoints")))
    sys.exit()

where = given["hydra.run.dir"].strip("'")
with open("calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
kept = given.get("checkpoint.dir", where + "/checkpoints").strip("'")
os.makedirs(kept + "/step-1")
lr = float(given.get("lr", 0.5))
if given.get("data") == "fails":
    print("Traceback: much")
    sys.exit("OutOfCheese: buy some")
if given.get("data") == "nothing":
    sys.exit()
if given.get("data") == "hangs":
    if os.path.exists("fifo"):
        with open("fifo", "w") as pipe:
            pipe.write(str(os.getpid()))
    threading.Event().wait()
runs = len(open("calls").read().splitlines())
noise = float(os.environ.get("NOISE", 0)) * (-runs % 3)
lines = [{"event": "start", "t": 0.0, "format": 1, "time": 0.0, "rank": 0, "world_size": 1}]
every, at = int(given.get("checkpoint.every", 40)), 0.0
stall = abs(lr - 0.25) * 10 + noise + {"even": 0, "slow": 5}.get(given.get("data", "even"), 1) + every / 1e4
for step in range(1, 101):
    at += 0.01
    lines.append({"event": "step", "t": at, "step": step})
    if step % every == 0:
        lines.append({"event": "stall", "t": at, "step": step, "start": at, "seconds": stall / 1e3})
        at += stall / 1e3
        lines.append({"event": "write", "t": at + 0.004, "step": step, "start": at, "seconds": 0.004, "bytes": 10})
lines.append({"event": "end", "t": at, "seconds": at, "status": "completed", "error": None, "peak_rss": 1})
with open(where + "/metrics.jsonl", "w") as file:
    file.write("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def tune(tmp_path, monkeypatch, capfd):
    """Run the command in a folder with the program, and return its code and what it wrote."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["tune", "train.py", *arguments])
        seen = capfd.readouterr()
        return code, seen.out, seen.err

    return run


def calls() -> list[list[str]]:
    return [json.loads(line) for line in Path("calls").read_text().splitlines()]


LR = ("--only", "--over", "lr=choice(0.25,0.5,1.0)")


def test_the_answer_is_a_command_line_that_is_best_and_runs(tune):
    code, out, err = tune("text='a b'", *LR, "--trials", "3", "--confirm", "2")
    assert code == 0
    assert "lr=0.25: 0.004 ms (spread 0 ms), 2.5 ms (spread 0 ms) by default; 2 runs each in turns. The gain is" in out
    assert "optuna" not in (out + err).lower(), "what chooses keeps quiet"
    assert "Warning" not in err
    line = out.splitlines()[-1]
    assert shlex.split(line) == ["python", "train.py", "text='a b'", "lr=0.25"]
    ran = [next((text for text in call if text.startswith("lr=")), "") for call in calls()]
    assert ran[0] == "", "the defaults come first"
    assert sorted(ran[:3]) == ["", "lr=0.25", "lr=1.0"], "nothing comes twice"
    assert ran[3:] == ["lr=0.25", "", "", "lr=0.25"], "best and defaults take turns"


def test_a_difference_that_chance_may_make_is_called_a_tie(tune, monkeypatch):
    monkeypatch.setenv("NOISE", "4")
    code, out, _ = tune("--only", "--over", "lr=0.5,0.499", "--trials", "2")
    assert code == 0
    assert "The gain is real" not in out
    assert "A tie: their runs overlap, so the defaults may be as good." in out


def test_without_a_reason_for_the_best_the_command_is_that_of_the_defaults(tune, tmp_path):
    # Better as a trial, a little worse when it is run again, and all runs within one spread.
    text = PROGRAM.replace(
        "noise = ", "noise = (runs % 2) * 3.0 + 0.1 * (runs > 2 and lr != 0.5) - 2.0 * (runs == 2) + "
    )
    (tmp_path / "train.py").write_text(text)
    code, out, _ = tune("--only", "--over", "lr=0.5,0.501", "--trials", "2", "--confirm", "2")
    assert code == 0
    assert "A tie: the difference is smaller than the spread, so the defaults will do." in out
    assert out.splitlines()[-1] == "python train.py"


def test_a_best_trial_that_was_chance_is_not_confirmed(tune, tmp_path):
    # Measured once, the trial is better; measured again it never is.
    text = PROGRAM.replace("noise = ", "noise = 9.0 * (runs > 2 and lr != 0.5) - 2.0 * (runs == 2) + ")
    (tmp_path / "train.py").write_text(text)
    code, out, _ = tune("--only", "--over", "lr=0.5,0.6", "--trials", "2", "--confirm", "2")
    assert code == 0
    assert "The defaults are better: what the search has found was chance." in out
    assert out.splitlines()[-1] == "python train.py"


def test_overrides_may_follow_options(tune):
    code, out, _ = tune("--trials", "1", "text=x", "--confirm", "0", *LR, "steps=9")
    assert code == 0
    assert calls()[0][:2] == ["text=x", "steps=9"]
    assert out.splitlines()[-1] == "python train.py text=x steps=9"


def test_trials_that_fail_hang_or_report_nothing_are_rows_and_the_search_goes_on(tune):
    arguments = ("--only", "--over", "data=even,slow,fails,nothing,hangs", "--trials", "9", "--trial-timeout", "3")
    code, out, _ = tune(*arguments, "--confirm", "0")
    assert code == 0
    assert "failed: OutOfCheese: buy some  data=fails" in out
    assert "failed: did not end within 3 s  data=hangs" in out
    assert "failed: it has recorded nothing" in out
    assert "All 5 combinations were tried." in out
    table = out[out.index("  -----") :]
    assert "OutOfCheese" in table
    assert table.index("the defaults") < table.index("data=slow") < table.index("OutOfCheese")
    statuses = {job.overrides: job.status for job in results(Path("outputs/tune-train/trials"))}
    assert statuses[("data=hangs",)] == "failed"
    assert statuses[("data=slow",)] == "completed"
    assert "  in trials/  " in out
    log = Path("outputs/tune-train/trials", table.split("trials/")[1].split("/")[0], "output.log")
    assert log.exists()


def test_where_nothing_can_be_measured_the_search_ends_early_and_shows_why(tune):
    code, _, err = tune("data=fails", "--only", "--over", "lr=range(1,100)", "--trials", "50")
    assert code == 1
    assert "None of the first 5 trials could be measured" in err
    assert "OutOfCheese: buy some" in err
    assert len(calls()) == 5


def test_the_error_for_a_run_without_a_checkpoint_has_the_remedy(tune):
    code, out, _ = tune("checkpoint.every=1000", "--only", "--over", "lr=1,2", "--trials", "1")
    assert code == 1
    assert "it has no stall_ms (it took no checkpoint: are there more steps than checkpoint.every?)" in out


def test_the_same_command_continues_and_measures_nothing_twice(tune):
    tune(*LR, "--trials", "2", "--confirm", "1")
    before = len(calls())
    code, out, _ = tune(*LR, "--trials", "2", "--confirm", "1")
    assert code == 0
    assert len(calls()) == before
    assert "2 of 2 trials were done before" in out
    code, out, _ = tune(*LR, "--trials", "3", "--confirm", "0")
    assert code == 0
    assert len(calls()) == before + 1
    assert "trial 3/3" in out


def test_a_search_with_other_settings_is_not_added_to_a_study(tune):
    first = ("--over", "lr=0.25,0.5,1.0")
    tune("--only", *first, "--trials", "1", "--confirm", "0")
    before = len(calls())
    for arguments, message in (
        ((*first, "--metric", "lost_percent"), "metric: it has stall_ms, this asks for lost_percent"),
        ((*first, "--over", "steps=1,2"), "the values of steps: it has none, this asks for 1,2"),
        ((*first, "text=x"), "program: it has python train.py, this asks for python train.py text=x"),
        ((*first, "--mtbf", "6h"), "mtbf_s: it has none, this asks for 21600.0"),
    ):
        code, _, err = tune("--only", *arguments)
        assert (code, len(calls())) == (2, before), arguments
        assert message in err
        assert "name another --output" in err


def test_ctrl_c_ends_the_current_run_and_the_next_search_continues(tune):
    os.mkfifo("fifo")
    started: list[int] = []

    def interrupt() -> None:
        started.append(int(Path("fifo").read_text()))
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    arguments = ("--only", "--over", "data=even,hangs", "--trials", "2", "--confirm", "0", "--trial-timeout", "60")
    code, out, err = tune(*arguments)
    waiting.join(60)
    assert code == 130
    assert "trial 1/2" in out
    assert "The same command goes on from outputs/tune-train." in err
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    os.unlink("fifo")
    code, out, _ = tune(*arguments[:-1], "0.3")
    assert code == 0
    assert "1 of 2 trials were done before" in out
    assert "did not end within 0.3 s" in out


def test_two_searches_do_not_share_a_directory(tune):
    import fcntl

    Path("outputs/tune-train").mkdir(parents=True)
    with open("outputs/tune-train/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = tune(*LR)
    assert code == 2
    assert "Another search is at work in outputs/tune-train" in err


def test_checkpoints_of_trials_are_gone_and_no_trial_sees_those_of_another(tune, tmp_path):
    shared = tmp_path / "shared"
    (shared / "step-7").mkdir(parents=True)
    code, _, _ = tune(f"checkpoint.dir={shared}", *LR, "--trials", "2", "--confirm", "0")
    assert code == 0
    used = {text for call in calls() for text in call if text.startswith("checkpoint.dir='")}
    assert len(used) == 2
    assert all(text.startswith(f"checkpoint.dir='{shared}/tune-") for text in used)
    assert [path.name for path in shared.iterdir()] == ["step-7"]
    code, _, _ = tune(*LR, "--trials", "1", "--confirm", "0", "--output", "other")
    assert code == 0
    assert not list(Path("other").rglob("checkpoints"))
    assert not [text for text in calls()[-1] if text.startswith("checkpoint.dir=")]


def test_an_interval_is_marked_where_it_was_judged_by_its_stall_alone(tune):
    every = ("--only", "--over", "checkpoint.every=10,40", "--trials", "2", "--confirm", "0")
    _, out, _ = tune(*every)
    assert out.splitlines()[-1] == "python train.py checkpoint.every=10"
    assert "checkpoint.every=10 was judged by stall_ms alone" in out
    _, out, _ = tune(*every, "--mtbf", "1s", "--output", "weighed")
    assert out.splitlines()[-1] == "python train.py checkpoint.every=10"
    assert "expected lost %" in out
    assert "alone" not in out


def test_json_is_one_document_with_the_answer_and_every_trial_and_greater_is_better_on_request(tune):
    code, out, err = tune(*LR, "--trials", "3", "--confirm", "1", "--json", "--direction", "maximize")
    seen = json.loads(out)
    assert code == 0
    assert "trial 3/3" in err
    assert seen["command"] == "python train.py lr=1.0"
    assert seen["overrides"] == ["lr=1.0"]
    assert seen["trials"][0]["value"] == pytest.approx(2.504)
    assert (seen["metric"], seen["direction"], seen["real"], len(seen["confirmed"])) == (
        "stall_ms",
        "maximize",
        None,
        2,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric", "stal_ms"), "Did you mean 'stall_ms'?"),
        (("--trials", "0"), "--trials must be at least 1"),
        (("--trial-timeout", "0"), "more than 0"),
        (("--confirm", "-1"), "0 for none"),
        (("--mtbf", "soon"), "is not a duration"),
        (("--mtbf", "0h"), "as in --mtbf 6h"),
        (("--mtbf", "6h", "--metric", "loss"), "leave --metric and --direction out"),
        (("broken=1",), "Could not override 'broken'."),
        (("lr=1,2",), "to search among them, write --over lr=1,2"),
        (("nonsense",), "nonsense is no override: write key=value"),
        (("--over", "lrr=1,2"), "the program has no 'lrr'. Did you mean 'lr'?"),
        (("--over", "lr=1"), "give it as an override"),
        (("lr=1", "--over", "lr=2,3"), "lr=1 holds fixed what --over lr=2,3 is to vary"),
        (("--over", "lr=2,3", "--over", "lr=4,5"), "given twice"),
        (("--only",), "There is nothing to vary"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(tune, arguments, message):
    code, _, err = tune(*arguments)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) < 12
    assert not Path("calls").exists()


def test_a_script_that_is_not_there_or_is_no_program_is_reported_in_a_line(tune, tmp_path):
    (tmp_path / "train.py").write_text("print('hello')")
    assert "is it a program of stagereg.main?" in tune()[2]
    (tmp_path / "train.py").unlink()
    assert "There is no script train.py" in tune()[2]


def test_a_database_that_is_none_is_reported_in_two_lines(tune):
    Path("notes.txt").write_text("not a database " * 100)
    code, _, err = tune(*LR, "--database", "notes.txt")
    assert code == 2
    assert "cannot use notes.txt as its database" in err
    assert "Name another with --database" in err


def test_without_optuna_one_line_shows_what_to_install(tune, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = tune()
    assert code == 2
    assert err.count("\n") == 1
    assert "pip install 'hydra-stagereg[tune]'" in err


def test_a_killed_search_leaves_a_study_that_can_be_continued(tune, monkeypatch):
    # The study has no result of the last trial, as when the process was killed in the middle of it.
    class Killed(BaseException):
        pass

    def die(self: Study, tried: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Study, "tell", die)
        with pytest.raises(Killed):
            tune(*LR, "--trials", "3")
    code, out, _ = tune(*LR, "--trials", "3", "--confirm", "0")
    assert code == 0
    assert "trial 1/3" in out
    assert out.splitlines()[-1] == "python train.py lr=0.25"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_is_tuned_over_its_stagers(tmp_path):
    examples = Path(__file__).parents[2] / "examples"
    shutil.copytree(examples / "conf", tmp_path / "conf")
    shutil.copy(examples / "train.py", tmp_path)
    arguments = [
        "data=uneven",
        "train.steps=40",
        "checkpoint.every=10",
        "model.layers=1",
        "--trials",
        "3",
        "--confirm",
        "1",
    ]
    command = [sys.executable, "-m", "stagereg", "tune", "train.py", *arguments, "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert [trial["status"] for trial in seen["trials"]] == ["completed"] * 3, seen["trials"]
    assert seen["trials"][0]["overrides"] == []
    assert seen["space"]["stager"]["values"].startswith("pinned_cached,")
    assert "torch_default" not in seen["space"]["stager"]["values"]
    found = shlex.split(seen["command"])
    assert found[:3] == ["python", "train.py", "data=uneven"]
    again = subprocess.run([sys.executable, *found[1:], "train.steps=2"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
