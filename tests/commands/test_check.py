"""A check reports which promises are kept and which broken, even if the plugin kills the process that tries it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagereg.commands.attempt as attempt
import stagereg.commands.target as target_module
from stagereg.cli import main
from stagereg.errors import ConfigError, RegistryError

# Contracts of no kind need no training to break their promises; each of these does it in another way.
HARMFUL = """
import ctypes, os, subprocess, sys, time
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

    def test_ends(self):
        '''It ends the process.'''
        os.write(2, b"last output\\n")
        os._exit(4)

    def test_crashes(self):
        '''It crashes.'''
        ctypes.string_at(0)

    def test_hangs(self):
        '''It hangs.'''
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
    def __init__(self, in_flight: int = 2, lend: bool = True):
        super().__init__(HostCopier(Pool(in_flight)))
        self.lend = lend

    def stage(self, state_dict):
        staged = super().stage(state_dict)
        return staged if self.lend else state_dict
"""

JOINABLE = """
import torch, torch.distributed as dist, stagereg

@stagereg.register("joinable", "{name}")
class Mine(stagereg.Joinable):
    def __init__(self):
        super().__init__()
    def join_hook(self, **kwargs):
        return stagereg.JoinHook()
    @property
    def join_device(self):
        return torch.device("cpu")
    @property
    def join_process_group(self):
        return dist.group.WORLD
"""


TWO = {"Leaves": "threading.Thread(target=threading.Event().wait).start()", "Innocent": "pass"}


def check(*arguments: str, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    """Run the command, which is to end with ``code``; return its output as JSON."""
    assert main(["check", "--json", *arguments]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def rows(result: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Verdict and observation, by the name of the promise."""
    return {row["name"]: (row["verdict"], row["seen"]) for section in result["sections"] for row in section["rows"]}


def package(
    folder: Path,
    name: str,
    source: str,
    plugins: str = "",
    contracts: str = "",
    needs: str = "Requires-Dist: hydra-stagereg\n",
) -> None:
    """Put an installed package into ``folder``, as pip leaves it there."""
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{needs}")
    groups = {"stagereg.plugins": plugins, "stagereg.contracts": contracts}
    (metadata / "entry_points.txt").write_text("".join(f"[{g}]\n{lines}\n" for g, lines in groups.items() if lines))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def line_of(text: str) -> int:
    return HARMFUL[: HARMFUL.index(text)].count("\n") + 1


def gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_plugin_that_harms_its_process_costs_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    file = tmp_path / "harmful.py"
    file.write_text(HARMFUL)
    result = check(str(file), "--timeout", "4", capsys=capsys, code=1)
    found = rows(result)
    assert list(found)[1:] == re.findall(r"def (test_\w+)", HARMFUL)
    assert found["test_keeps"] == ("kept", "")
    assert found["test_breaks"] == ("broken", "3 is not 4")
    assert found["test_raises"][0] == "broken"
    assert re.search(rf"ValueError: of its own \(.*harmful.py:{line_of('raise ValueError')}\)", found["test_raises"][1])
    assert found["test_skips"] == ("skipped", "no such machine")
    assert re.search(rf"SystemExit: 3 \(.*harmful.py:{line_of('sys.exit(3)')}\)", found["test_leaves"][1])
    assert found["test_ends"] == ("broken", "the process ended with exit code 4\n  last output")
    assert re.search(
        rf"died of SIGSEGV, in test_crashes \(.*harmful.py:{line_of('ctypes.string_at')}\)", found["test_crashes"][1]
    )
    assert re.search(
        rf"still running after 4 s, in test_hangs \(.*harmful.py:{line_of('time.sleep')}\)", found["test_hangs"][1]
    )
    assert found["test_after"] == ("kept", "")
    assert result["counts"] == {"kept": 3, "broken": 6, "skipped": 1}
    assert not result["kept"]
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_thread_that_delays_the_end_is_not_blamed_on_the_last_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_END_S", 0.5)
    file = tmp_path / "staying.py"
    classes = "".join(f"class {n}(Contract):\n    def test_it(self): {body}\n" for n, body in TWO.items())
    file.write_text(f"import threading\nfrom stagereg.testing import Contract\n{classes}")
    result = check(str(file), capsys=capsys, code=1)
    seen = {section["title"]: [row["name"] for row in section["rows"]] for section in result["sections"]}
    assert seen == {str(file): ["imports", "ends"], "Leaves": ["test_it"], "Innocent": ["test_it"]}


def test_a_script_that_ends_the_process_on_import_is_reported_with_where_its_main_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\n\nsys.exit(4)\n")
    verdict, seen = rows(check(str(file), capsys=capsys, code=1))["imports"]
    assert verdict == "broken"
    assert "__main__" in seen
    assert seen.endswith(f"SystemExit: 4 ({file}:3)")


def test_a_stager_that_its_defaults_do_not_build_is_not_shown_and_the_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asking.py"
    source = STAGER.format(name="asking").replace("in_flight: int = 2", "in_flight: int")
    file.write_text(source)
    verdict, seen = rows(check(str(file), capsys=capsys, code=1))["contract"]
    assert verdict == "not shown"
    assert "no default for in_flight: add --set in_flight=..." in seen
    file.write_text(source.replace("in_flight: int", "in_flight: int, group: object"))
    verdict, seen = rows(check(str(file), "--set", "in_flight=2", capsys=capsys, code=1))["contract"]
    assert verdict == "not shown"
    assert seen.startswith("the program has to pass group\n")
    assert "StagerContract" in seen


@pytest.mark.slow
def test_a_component_that_ends_every_process_is_not_tried_further_after_a_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_PATIENCE", 1)
    promises = "".join(f"    def test_{i}(self): os._exit({i})\n" for i in range(4, 8))
    file = tmp_path / "deadly.py"
    file.write_text(f"import os\nfrom stagereg.testing import Contract\nclass Deadly(Contract):\n{promises}")
    assert main(["check", str(file)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"exit code 4\n.*The other 3 promises.*not tried", out)
    assert "1 kept, 1 broken, 3 skipped" in out


@pytest.mark.slow
def test_a_stager_without_a_contract_is_built_from_its_defaults_and_the_given_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(STAGER.format(name="mine"))
    result = check(str(file), "--set", "lend=false", capsys=capsys, code=1)
    (section,) = (s for s in result["sections"] if s["title"] == "stager/mine")
    assert section["origin"].endswith("mine.py:7")
    verdicts = [row["verdict"] for row in section["rows"]]
    assert {"kept", "broken"} <= set(verdicts)
    broken = [row["promise"] for row in section["rows"] if row["verdict"] == "broken"]
    assert any("source" in promise for promise in broken)
    assert rows(result)["types"] == ("kept", "options: in_flight, lend")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocking", "pinned_cached", "incremental", "overlapped"])
def test_the_stagers_that_are_built_in_keep_their_promises(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = check(f"stager/{name}", capsys=capsys, code=0)
    assert result["kept"]
    assert result["counts"]["kept"] > 20


def test_a_joinable_without_a_contract_is_not_tried_and_the_contract_to_write_is_shown(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(site, "lonely", JOINABLE.format(name="lonely"), "joinable.lonely = lonely:Mine")
    result = check("lonely", capsys=capsys, code=1)
    verdict, seen = rows(result)["contract"]
    assert verdict == "not shown"
    assert "stagereg.testing.JoinableContract" in seen
    assert '"joinable.lonely" = "lonely.contract:Name"' in seen
    assert rows(result)["depends"] == ("kept", "")


def test_errors_in_the_metadata_of_a_package_are_reported(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = STAGER.format(name="other") + "Contract = None\n"
    package(
        site,
        "careless",
        source,
        "stager.careless = careless:Mine\nstagr.careless = careless:Mine",
        "stager.careless = careless:Contract\nstager.carelss = careless:Contract",
        needs="Requires-Dist: hydra-stagereg-like\n",
    )
    found = rows(check("careless", capsys=capsys, code=1))
    assert "'stagr.careless' is no kind and name. Did you mean 'stager.careless'?" in found["announces"][1]
    assert "dependencies" in found["depends"][1]
    assert "'stager.carelss'. Did you mean 'stager.careless'?" in found["contracts"][1]
    assert found["agrees"] == ("broken", "it is announced as 'careless', and decorated as 'other'")
    assert "is no class that inherits stagereg.testing.StagerContract" in found["contract"][1]
    assert {verdict for verdict, _ in found.values()} == {"kept", "broken"}
    assert "builds" not in found


def test_a_package_that_requires_the_unrelated_stagereg_is_reported(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(site, "older", STAGER.format(name="older"), "stager.older = older:Mine", needs="Requires-Dist: stagereg\n")
    found = rows(check("older", capsys=capsys, code=1))
    assert found["depends"][0] == found["loads"][0] == "broken"
    assert "requires 'stagereg', which is an unrelated project" in found["depends"][1]
    assert "'hydra-stagereg'" in found["depends"][1]


def test_a_package_that_cannot_be_imported_is_one_row_with_the_cause(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(site, "leaving", "raise SystemExit('no licence')", "stager.leaving = leaving:Mine")
    found = rows(check("leaving", capsys=capsys, code=1))
    assert found["loads"][0] == "broken"
    assert "leaving 1.2" in found["loads"][1]
    assert "no licence" in found["loads"][1]
    assert list(found)[-1] == "loads"


@pytest.mark.slow
def test_a_package_that_ends_the_process_that_imports_it_is_one_row(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(site, "dying", "import os; os._exit(7)", "stager.dying = dying:Mine")
    found = rows(check("dying", capsys=capsys, code=1))
    assert found["loads"] == ("broken", "the process ended with exit code 7")
    assert list(found)[-1] == "loads"


class TestResolve:
    """What a target means is known without importing anything."""

    def test_a_package_is_all_that_it_announces_with_its_contracts(self, site: Path) -> None:
        bomb = "raise RuntimeError('imported')"
        plugins = "stager.one = the_two:One\njoinable.two = the_two:Two"
        package(site, "the_two", bomb, plugins, "joinable.two = the_two:TwoContract")
        package(site, "another", bomb, "stager.third = another:Third", "stager.one = another:NotYours")
        found = target_module.resolve("The-Two")  # as pip takes it
        assert found.package == "the_two 1.2"
        assert [(job.kind, job.name, job.contract) for job in found.jobs] == [
            ("joinable", "two", "the_two:TwoContract"),
            ("stager", "one", ""),
        ]

    def test_one_component_is_meant_by_its_kind_and_name_or_by_a_name_that_one_kind_has(self, site: Path) -> None:
        for target in ("stager/pinned_cached", "pinned_cached"):
            assert [job.title for job in target_module.resolve(target).jobs] == ["stager/pinned_cached"]
        with pytest.raises(ConfigError, match="choose one: join_hook/ddp or joinable/ddp"):
            target_module.resolve("ddp")

    def test_two_packages_of_one_name_are_distinguished(self, site: Path) -> None:
        package(site, "a_one", "", "stager.shared_name = a_one:Mine")
        package(site, "b_one", "", "stager.shared_name = b_one:Mine", "stager.shared_name = b_one:Contract")
        with pytest.raises(RegistryError, match="say which"):
            target_module.resolve("stager/shared_name")
        (job,) = target_module.resolve("stager/shared_name@b_one").jobs
        assert (job.name, job.contract) == ("shared_name@b-one", "b_one:Contract")

    def test_a_folder_is_the_package_that_it_holds(self, site: Path, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "the-held"\n')
        with pytest.raises(ConfigError, match="pip install --editable"):
            target_module.resolve(str(tmp_path))
        package(site, "the_held", "", "stager.held = the_held:Mine")
        assert [job.name for job in target_module.resolve(str(tmp_path)).jobs] == ["held"]

    def test_a_module_is_what_packages_announce_in_it_or_what_importing_it_shows(self, site: Path) -> None:
        package(site, "dist_name", "", "stager.inner = module_name.inner:Mine")
        (site / "module_name").mkdir()
        (site / "plain.py").write_text("raise RuntimeError('imported')")
        assert [job.title for job in target_module.resolve("module_name").jobs] == ["stager/inner"]
        assert target_module.resolve("plain").jobs == [target_module.CheckJob(module="plain")]


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (["nowhere.py"], "There is no file nowhere.py"),
        (["pined_cached"], "Did you mean 'pinned_cached'?"),
        (["stager/pined_cached"], "Did you mean 'pinned_cached'?"),
        (["stagr/x"], "Did you mean 'stager'?"),
        (["a b"], "is nothing that can be checked"),
        (["hydra_core"], "announces nothing"),
        (["blocking", "--timeout", "0"], "more than 0"),
        (["blocking", "--set", "threads"], "key=value"),
        (["blocking", "--set", "_target_=os.system"], "key=value"),
    ],
)
def test_a_target_that_cannot_be_checked_is_one_error_with_valid_targets(
    arguments: list[str], result: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert result in captured.err
    assert not captured.out


def test_a_file_without_a_plugin_and_an_option_that_is_none_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("")
    assert main(["check", str(tmp_path / "empty.py")]) == 2
    assert "registers no plugin and has no contract" in capsys.readouterr().err
    assert main(["check", "blocking", "--set", "thread=1"]) == 2
    assert "Did you mean 'threads'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_check_kills_the_process_of_the_plugin(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    (tmp_path / "hung.py").write_text(
        f"import os, time\nopen({str(pids)!r} + '.tmp', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(pids)!r} + '.tmp', {str(pids)!r})\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "stagereg", "check", "hung.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as checking:
        until(pids.exists)
        checking.kill()
    until(lambda: gone(int(pids.read_text())))


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        os.sched_yield()
