"""A check reports which promises are kept and which broken, even if the plugin kills the process that tries it."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagereg.commands.checking as checking
from stagereg.commands.child import call_in_child
from stagereg.errors import RegistryError

from ..support.programs import await_gone
from .conftest import Command, Install

Check = Callable[..., dict[str, Any]]

# Contracts of no kind need no training to break their promises; each of these does it in another way.
HARMFUL = """
import os, pytest, subprocess, sys, time
from stagereg.testing import Contract

print("a plugin may print", flush=True)

class Harmful(Contract):
    def test_keeps(self):
        '''It keeps this.'''
        print("noise on stdout", flush=True)

    def test_breaks(self):
        '''It breaks this.'''
        self.broken("3 is not 4")

    def test_raises(self):
        '''It raises.'''
        raise ValueError("of its own")

    def test_skips(self):
        '''It cannot be tried.'''
        self.skipped("no such machine")

    def test_leaves(self):
        '''It calls sys.exit.'''
        sys.exit(3)

    @pytest.mark.parametrize("number", [1, 2])
    def test_takes(self, number, tmp_path):
        '''It takes what pytest gives.'''
        assert tmp_path.is_dir() and number in (1, 2)

    @pytest.mark.skipif(True, reason="not today")
    def test_rests(self):
        '''It is left out.'''
        raise ValueError

    def test_harms(self):
        '''It does no harm.'''
        child = subprocess.Popen(["sleep", "600"])
        with open(os.environ["PIDS"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)

    def test_after(self):
        '''It is tried after all that.'''
"""

STAGER = """
import stagereg
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.stagers.host import HostStager

@stagereg.register("stager", "{name}")
class Mine(HostStager):
    def __init__(self, lend: bool = False):
        super().__init__(HostCopier(Pool(2)))
        self.lend = lend

    def stage(self, state_dict):
        staged = super().stage(state_dict)
        return staged if self.lend else state_dict
"""

TIERS = """
import stagereg
from stagereg.extensions.tiers.disk import DiskTier

@stagereg.register("tier", "whole")
class Whole(DiskTier):
    pass

@stagereg.register("tier", "asking")
class Asking(DiskTier):
    def __init__(self, dir: str, pool: str, **options):
        super().__init__(dir, **options)
"""

JOINABLE = """
import stagereg

class Mine(stagereg.Joinable):
    def join_hook(self, **kwargs): ...
    join_device = property(lambda self: ...)
    join_process_group = property(lambda self: ...)
"""


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a checked file is put on it


def rows(result: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Verdict and observation, by the name of the promise."""
    return {case["name"]: (case["verdict"], case["seen"]) for case in result["cases"]}


@pytest.fixture
def check(command: Command) -> Check:
    return lambda *arguments, code: command("check", "--json", *arguments, code=code).json


TWO_RULES = """
import stagereg

@stagereg.register("keep", "a_wrong")
class Wrong:
    def select(self, checkpoints, metrics):
        return {checkpoints[-1].path: "the oldest"} if checkpoints else {}

@stagereg.register("keep", "b_right")
class Right:
    def select(self, checkpoints, metrics):
        return {checkpoint.path: "all" for checkpoint in checkpoints}
"""


@pytest.mark.slow
def test_two_components_of_one_kind_without_contracts_are_tried_one_by_one(tmp_path: Path, check: Check) -> None:
    file = tmp_path / "rules.py"
    file.write_text(TWO_RULES)
    verdicts: dict[str, set[str]] = {}
    for case in check(file, code=1)["cases"]:
        verdicts.setdefault(case["section"].split()[0], set()).add(case["verdict"])
    assert "broken" in verdicts["keep/a_wrong"]
    assert "broken" not in verdicts["keep/b_right"]


# A process that ends by itself is quickly tried with doctor, which has the same children.
def test_a_hung_process_is_named_with_its_case(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    file = tmp_path / "harmful.py"
    file.write_text(HARMFUL)
    result = check(file, "--timeout", "10", code=1)
    found = rows(result)
    line = 1 + HARMFUL.splitlines().index("        time.sleep(600)")
    assert found["imports"] == found["test_keeps"] == ("kept", "")
    assert found["test_breaks"] == ("broken", "3 is not 4")
    for name, text in (("test_raises", "ValueError: of its own"), ("test_leaves", "SystemExit: 3")):
        assert re.fullmatch(rf"{text} \(.*harmful.py:\d+\)", found[name][1])
    assert found["test_skips"] == ("skipped", "no such machine")
    assert found["test_takes[1]"] == found["test_takes[2]"] == ("kept", "")
    assert found["test_rests"] == ("skipped", "not today")
    stuck = rf"still running after 10 s: stuck in test_harms \(.*harmful.py:{line}\)"
    assert re.fullmatch(stuck, found["test_harms"][1])
    assert found["test_after"] == ("skipped", "not run: the process terminated first")
    assert result["counts"] == {"kept": 4, "broken": 4, "skipped": 3}
    assert not result["kept"]
    assert await_gone(*map(int, (tmp_path / "pids").read_text().split()))


def test_a_child_gets_the_time_that_it_asks_for() -> None:
    def called(more_s: float) -> object:
        progress = itertools.chain([(0, 0.0)], itertools.repeat((1, more_s)))
        call = "subprocess:getoutput", "sleep 2; echo done"
        return call_in_child(*call, limit_s=0.01, start_s=60.0, progress=lambda: next(progress))[0]

    assert called(600.0) == "done"
    assert called(0.0) is None


WAITING = """
import threading
from stagereg.testing import Contract

class Waiting(Contract):
    def test_waits(self):
        '''It comes back.'''
        self.within(threading.Event().wait, 9.0)

    def test_after(self):
        '''It is tried after that.'''
"""


@pytest.mark.slow
def test_a_wait_that_the_contract_ends_outlasts_the_limit(tmp_path: Path, check: Check) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    found = rows(check(tmp_path / "waiting.py", "--timeout", "5", code=1))
    assert "the call did not return within 9 s. It is at " in found["test_waits"][1]
    assert found["test_after"] == ("kept", "")


@pytest.mark.slow
def test_what_has_no_contract_is_not_shown(install: Install, check: Check) -> None:
    asking = STAGER.format(name="asking").replace("lend: bool = False", "lend: bool")
    install("asking", asking, {"stager.asking": "Mine"}, requires="hydra-stagereg")
    verdict, seen = rows(check("asking", code=1))["contract"]
    assert verdict == "not shown"
    assert "lend" in seen
    install("lonely", JOINABLE, {"joinable.lonely": "Mine"}, requires="hydra-stagereg")
    found = rows(check("lonely", code=1))
    assert found["contract"][0] == "not shown"
    assert "stagereg.testing.JoinableContract" in found["contract"][1]
    assert '"joinable.lonely" = "lonely.contract:Name"' in found["contract"][1]
    assert found["metadata"] == ("kept", "")


@pytest.mark.slow
def test_a_tier_without_a_contract_is_built_from_its_folder(tmp_path: Path, check: Check) -> None:
    file = tmp_path / "many.py"
    file.write_text(TIERS)
    verdicts = {(case["section"].split()[0], case["name"]): case["verdict"] for case in check(file, code=1)["cases"]}
    assert verdicts["tier/whole", "test_durable"] == "kept"
    assert {verdict for (section, _), verdict in verdicts.items() if section == "tier/whole"} == {"kept"}
    assert verdicts["tier/asking", "contract"] == "not shown"


SEVERAL = """
import stagereg
from stagereg.extensions.tiers.disk import DiskTier
from stagereg.testing import KeepContract, OnCommitContract

@stagereg.register("join", "note")
def note():
    return None

@stagereg.register("keep", "newest")
class Newest:
    def __init__(self, count: int):
        self.count = count

    def select(self, checkpoints, metrics):
        return {each.path: "newest" for each in checkpoints[: self.count]}

@stagereg.register("on_commit", "note")
class Note:
    def committed(self, checkpoint):
        pass

@stagereg.register("tier", "mine")
class Mine(DiskTier):
    pass

class NoteContract(OnCommitContract):
    def make(self):
        return Note()

class RuleContract(KeepContract):
    def make(self):
        return Newest(2)
"""


@pytest.mark.slow
def test_each_contract_of_a_file_is_of_its_kind(tmp_path: Path, check: Check) -> None:
    file = tmp_path / "several.py"
    file.write_text(SEVERAL)
    cases = {(case["section"].split()[0], case["name"]): case["verdict"] for case in check(file, code=0)["cases"]}
    assert cases["on_commit/note", "test_any_metrics"] == cases["on_commit/note", "contract"] == "kept"
    assert cases["keep/newest", "test_newest_is_retained"] == cases["keep/newest", "contract"] == "kept"
    assert cases["tier/mine", "test_durable"] == "kept"
    assert ("tier/mine", "contract") not in cases
    assert cases["join/note", "contract"] == "skipped"


@pytest.mark.slow
def test_a_stager_without_a_contract_is_built_from_defaults(tmp_path: Path, check: Check) -> None:
    file = tmp_path / "mine.py"
    file.write_text(STAGER.format(name="mine"))
    result = check(file, code=1)
    cases = [case for case in result["cases"] if case["section"].startswith("stager/mine")]
    assert cases[0]["section"].endswith("mine.py:7")
    assert {"kept", "broken"} <= {case["verdict"] for case in cases}
    assert any("source" in case["promise"] for case in cases if case["verdict"] == "broken")
    assert rows(result)["loads"] == ("kept", "options: lend")


@pytest.mark.slow
def test_errors_in_the_metadata_of_a_package_are_reported(install: Install, check: Check) -> None:
    contracts = {"stager.careless": "Contract"}
    source = STAGER.format(name="careless") + "Contract = None\n"
    plugins = {"stager.careless": "Mine", "stagr.careless": "Mine"}
    install("careless", source, plugins, contracts)
    found = rows(check("careless", code=1))
    assert found["metadata"][0] == "broken"
    assert "Did you mean 'stager'?" in found["metadata"][1]
    assert "does not inherit stagereg.testing.StagerContract" in found["contract"][1]


BROKEN = """
from stagereg.testing import Contract

class BrokenContract(Contract):
    def test_breaks(self):
        '''It breaks this.'''
        self.broken("3 is not 4")

    def test_keeps(self):
        '''It keeps this.'''
"""


@pytest.mark.slow
def test_what_is_not_kept_is_repeated_last(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    full, _, repeated = command("check", "mine.py", code=1).out.partition("\nNot kept: BrokenContract\n")
    assert [line.split() for line in full.splitlines() if "It breaks" in line] == [
        ["broken", "It", "breaks", "this.", "3", "is", "not", "4"]
    ]
    assert "It keeps this." in full
    assert repeated == (
        "  verdict  promise          seen\n"
        "  -------  ---------------  ----------\n"
        "  broken   It breaks this.  3 is not 4\n"
        "\n"
        "mine.py: 2 kept, 1 broken\n"
    )


PROJECT = """
[project]
name = "not-yet"
version = "2.0"
dependencies = ["stagereg>=1"]

[project.entry-points."stagereg.plugins"]
"stager.not_yet" = "not_yet.stager:Mine"

[project.entry-points."stagereg.contracts"]
"stager.not_yet" = "not_yet.contract:BrokenContract"
"""


@pytest.mark.slow
def test_a_folder_is_checked_as_if_it_was_installed(tmp_path: Path, check: Check, command: Command) -> None:
    module = tmp_path / "src" / "not_yet"
    module.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (module / "stager.py").write_text(STAGER.format(name="not_yet").replace("@stagereg", "# "))
    (module / "contract.py").write_text(BROKEN.replace("import Contract", "import StagerContract as Contract"))
    result = check(tmp_path, code=1)
    found = rows(result)
    assert {case["section"] for case in result["cases"]} == {
        "not-yet 2.0",
        "stager/not_yet  not_yet.stager:Mine of not-yet 2.0",
    }
    assert "which is an unrelated project" in found["metadata"][1]
    assert found["loads"][0] == "broken"
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace('"stagereg>=1"', ""))
    found = rows(check(tmp_path, code=1))
    assert found["metadata"] == found["test_keeps"] == ("kept", "")
    assert found["test_breaks"] == ("broken", "3 is not 4")
    (tmp_path / "pyproject.toml").write_text("[project")
    assert "is not valid TOML" in command("check", tmp_path, code=2).err


def test_without_pytest_its_extra_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else find(name))
    assert "pip install './stagereg[check]'" in command("check", "blocking", code=2).err


def test_what_a_target_means_is_known_without_importing_it(install: Install) -> None:
    bomb = "raise RuntimeError('imported')"
    install("the_two", bomb, {"stager.one": "One", "joinable.two": "Two"}, {"joinable.two": "C"}, "hydra-stagereg")
    install("plain", bomb, {})
    for target in ("The-Two", "the_two"):  # as pip takes it, and the module
        jobs, [case] = checking.resolve(target)
        assert jobs == ["joinable/two", "stager/one"]
        assert (case["section"], case["verdict"]) == ("the_two 1.2", "kept")
    assert checking.resolve("plain") == (["plain"], [])
    for target in ("stager/pinned_cached", "pinned_cached"):
        assert checking.resolve(target) == (["stager/pinned_cached"], [])
    install("the_held", bomb, {"stager.held": "Mine", "stager.one": "Mine"})
    assert checking.resolve("the_held")[0] == ["stager/held", "stager/one@the-held"]
    with pytest.raises(RegistryError, match="Write one of"):
        checking.resolve("stager/one")
    assert checking.resolve("stager/one@the_held")[0] == ["stager/one@the-held"]


@pytest.mark.parametrize(
    ("target", "result"),
    [
        ("nowhere.py", "the file nowhere.py does not exist"),
        pytest.param("empty.py", "registers no plugin and has no contract", marks=pytest.mark.slow),
        ("pined_cached", "Did you mean 'pinned_cached'?"),
        ("stagr/x", "Did you mean 'stager'?"),
        ("a b", "is not an installed package, module or component"),
        (".", "or install the package (`pip install -e .`) and use its name."),
        ("hydra_core", "Name an installed package with plugins"),
    ],
)
def test_what_cannot_be_checked_is_one_error(
    target: str, result: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").touch()
    captured = command("check", target, code=2)
    assert result in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_a_killed_check_kills_the_process_of_the_plugin(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    begin = "import os, time\nopen('tmp', 'w').write(str(os.getpid()))\n"
    (tmp_path / "hung.py").write_text(begin + "os.rename('tmp', 'pid')\ntime.sleep(600)")
    command = [sys.executable, "-m", "stagereg", "check", "hung.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while not pid.exists():
            os.sched_yield()
        running.kill()
    assert await_gone(int(pid.read_text()))
