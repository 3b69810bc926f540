"""What a user or the author of a plugin does wrong, on the command line: one message that says what to write."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ..support.app import App
from .test_first_day import CONFIG, app_in

MINE = """
import dataclasses
import time
import stagereg
from stagereg import ByteSize
from stagereg.stagers.blocking import BlockingStager

class Base(BlockingStager):
    def __init__(self, n: int = 3):
        super().__init__()

@stagereg.register("stager", "raises")
class Raises(Base):
    def stage(self, state_dict): raise KeyError("no cheese")

@stagereg.register("stager", "nothing")
class Nothing(Base):
    def stage(self, state_dict): pass

@stagereg.register("stager", "less")
class Less(Base):
    def stage(self, state_dict): return {k: v for k, v in super().stage(state_dict).items() if k != "optimizer"}

@stagereg.register("stager", "half_made")
class HalfMade(BlockingStager):
    def __init__(self, n: int = 3): self.n = n

@stagereg.register("stager", "unbuilt")
class Unbuilt(Base):
    def __init__(self, key: str = "none"): self.licence = {}[key]

@stagereg.register("stager", "wrong_default")
class WrongDefault(Base):
    def __init__(self, n: int = "abc"): super().__init__()

@dataclasses.dataclass
class Retry:
    times: int = 3

@stagereg.register("stager", "options")
class Options(Base):
    def __init__(
        self, limit: ByteSize = ByteSize("1MiB"), retry: Retry = Retry(), more: dict[str, ByteSize] | None = None
    ): super().__init__()

@stagereg.register("stager", "hangs")
class Hangs(Base):
    def stage(self, state_dict): time.sleep(600)
"""
BARE = "import stagereg\n\n@stagereg.register\nclass Mine: ..."


@pytest.fixture
def app(tmp_path: Path) -> App:
    app = app_in(tmp_path)
    for name, text in {"mine.py": MINE, "bare.py": BARE}.items():
        app.write(name, text)
    return app


@pytest.mark.slow
def test_a_joinable_or_hook_goes_where_a_join_looks_for_it(app: App) -> None:
    joinable, hook, below = app.run_each(
        ("+joinable=ddp",), ("+join_hook=ddp",), ("+join_hook@join.joinables.model.hook=ddp",)
    )
    named = "with the joinable's NAME, as in stagereg.instantiate(cfg.join, NAME=...)."
    unused = (
        "stagereg: +{0}=ddp has no effect: nothing reads the key {0} at the top level of the config. Write +{0}@{1}="
    )
    unused += "ddp, "
    assert app.refusal(joinable) == f"{unused.format('joinable', 'join.joinables.NAME')}{named}\n"
    assert app.refusal(hook) == f"{unused.format('join_hook', 'join.joinables.NAME.hook')}{named}\n"
    assert app.refusal(below).endswith(
        "but must be the config of a joinable (+joinable@join.joinables.model=NAME, without + if one is chosen; for "
        "none ~joinable@join.joinables.model).\n"
    )


@pytest.mark.slow
def test_a_stager_that_fails_is_named_with_its_line(app: App) -> None:
    lines = [("plugins=[mine]", f"stager={name}") for name in ("raises", "nothing", "less")]
    raises, nothing, less = [app.refusal(each) for each in app.run_each(*lines)]
    line = 1 + MINE.splitlines().index('    def stage(self, state_dict): raise KeyError("no cheese")')
    where = f"({app.folder / 'mine.py'}:{line}), raised in stage() of mine.Raises"
    assert f"rank 0: Step 10 was not saved: KeyError: 'no cheese' {where}\n" in raises
    assert ": stage() of mine.Nothing must return a copy of its dict, but returned None. This run has no " in nothing
    assert ": stage() of mine.Less returned a copy with another structure: 'optimizer' is missing. A stager may" in less


def test_a_stager_that_hangs_ends_the_run_within_the_timeout(app: App) -> None:
    began = time.monotonic()
    done = app.fork("plugins=[mine]", "stager=hangs", "checkpoint.failure.timeout=2s", "nproc=1")
    assert done.returncode == 1
    assert time.monotonic() - began < 60
    said = "rank 0: Step 10 was not saved: stage() of mine.Hangs has not returned for 2 s (checkpoint.failure.timeout)"
    assert f"stagereg: {said}. This run has no complete checkpoint" in done.stderr


MISUSES = {
    ("stager=half_made",): "rank 0: HalfMade.__init__ must call super().__init__().",
    ("stager=unbuilt",): "rank 0: stager: stager/unbuilt was not built: KeyError: 'none' (FOLDER/mine.py:30). Correct "
    "its options or its code; set HYDRA_FULL_ERROR=1 for the whole traceback.",
    ("stager=wrong_default",): "stagereg: WrongDefault: the default of n, 'abc', does not have the annotated type int.",
    (
        "stager=options",
        "stager.limit=null",
    ): "rank 0: stager.limit: it must be a size such as 4GiB, not null.",
    (
        "stager=options",
        "stager.retry.tmes=3",
    ): "stagereg: stager.retry takes no 'tmes'. Did you mean 'times'? It takes: times",
    (
        "stager=options",
        "stager.more.a=1",
    ): "stagereg: stager.more takes any key. To add a key, write +stager.more.a=...",
    ("+stager=options",): "stagereg: stager is already selected. Write stager=options, without +",
    ("plugins=[bare]",): 'stagereg.errors.RegistryError: Write @stagereg.register("stager", "my_name"): a kind, and '
    "the name for users. (FOLDER/bare.py:3)",
    (
        "-cn",
        "misspelt",
        "nproc=2",
    ): "stagereg: the config has a list 'defualts', but Hydra does not compose it. Did you mean 'defaults'?",
}


UNFIT = {
    "checkpoint.every=ten": "checkpoint.every is 'ten'. It must be one of: 'auto', or a whole number.",
    "checkpoint.every=0": "checkpoint.every must be a whole number of at least 1, not 0.",
    "checkpoint.keep=-1": "checkpoint.keep must be a whole number of at least 1, not -1.",
    "checkpoint.keep={newest: 0}": "checkpoint.keep.newest must be a whole number of at least 1, not 0.",
    "checkpoint.dir=app.py": "checkpoint.dir=app.py must be the path or URL of a directory, but app.py is a file.",
}


def test_a_value_that_cannot_be_is_refused_before_ranks_start(app: App) -> None:
    done = app.run_each(*((override, "nproc=2") for override in UNFIT))
    assert [app.refusal(each) for each in done] == [f"stagereg: {line}\n" for line in UNFIT.values()]


def test_a_misuse_is_one_line_that_says_what_to_write(app: App) -> None:
    app.write("conf/misspelt.yaml", f"defualts: [stagereg, _self_]\n{CONFIG}")
    done = app.run_each(*(("plugins=[mine]", *line) if "stager=" in line[0] else line for line in MISUSES))
    said = [app.refusal(each).replace(str(app.folder), "FOLDER").splitlines()[-1] for each in done]
    assert said == list(MISUSES.values())
