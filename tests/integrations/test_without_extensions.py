"""Every integration is imported without extensions. Where a trainer is not installed, empty classes take its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagereg.base.providers import folders

from ..support.forks import run_forked

INTEGRATIONS = sorted(each.stem for each in (Path(__file__).parents[2] / "stagereg/integrations").glob("[a-z]*.py"))
PROGRAM = """
import importlib, importlib.abc, importlib.machinery, importlib.metadata, importlib.util, json, sys, traceback, types

hidden, modules = map(json.loads, sys.argv[1:])

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"checkpoint_io": property()})

class Stub(types.ModuleType):
    __version__, __path__ = "0", []
    def __getattr__(self, name):
        return getattr(Anything, name) if name.startswith("__") else Anything(name, (), {"checkpoint_io": property()})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"stagereg.extensions.{each}" for each in hidden)):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)
        if name.partition(".")[0] in missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

trainers = "accelerate", "lightning", "lightning_utilities", "ray", "torchtitan", "transformers"
missing = {each for each in trainers if importlib.util.find_spec(each) is None}
for each in [each for each in sys.modules if each.partition(".")[0] == "stagereg"]:
    del sys.modules[each]
sys.meta_path.insert(0, Finder())
of_installed = importlib.metadata.version
importlib.metadata.version = lambda name: "0" if name in missing else of_installed(name)
providers = importlib.import_module("stagereg.base.providers")
left = tuple(each for each in providers.folders() if each not in hidden)
providers.folders = lambda: left
failed = {}
for each in modules:
    try:
        importlib.import_module(f"stagereg.integrations.{each}")
    except BaseException:
        failed[each] = traceback.format_exc(limit=-3)
assert not [each for each in sys.modules if each.startswith(tuple(f"stagereg.extensions.{one}" for one in hidden))]
import stagereg
said = {}
try:
    stagereg.open_checkpoint("here")
except Exception as error:
    said = str(error)
print("FOUND", json.dumps([failed, said]))
"""


@pytest.mark.parametrize("hidden", [*([each] for each in folders()), [*folders()]], ids=lambda each: each[0])
def test_an_integration_is_imported_without_an_extension_that_it_does_not_need(hidden: list[str]) -> None:
    done = run_forked(PROGRAM, json.dumps(hidden), json.dumps(INTEGRATIONS), ignores_warnings=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    failed, said = json.loads(line.removeprefix("FOUND "))
    assert failed == {}
    if "interop" in hidden:
        assert said.startswith("stagereg.open_checkpoint is not available. It needs stagereg/extensions/interop, ")
