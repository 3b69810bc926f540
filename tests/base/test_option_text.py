"""Messages write an option in the form of the program that has the component: an override, or Python."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize
from omegaconf import OmegaConf

import stagereg
import stagereg.base.option_text as option_text
from stagereg.assembly import Checkpointer
from stagereg.base.option_text import choice, option
from stagereg.errors import CheckpointError, ConfigError

PACKAGE = Path(stagereg.__file__).parent


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    before = {**option_text._keys}
    option_text._keys.clear()
    yield
    option_text._keys.clear()
    option_text._keys.update(before)


def composed(*overrides: str) -> Any:
    with initialize(None, version_base="1.3"):
        return compose("stagereg", overrides=[*overrides, "stager=blocking"]).checkpoint


OPTIONS: list[tuple[str, Any, str]] = [
    ("checkpoint.resume", "never", 'resume="never"'),
    ("checkpoint.dir", Path("some/path"), 'dir="some/path"'),
    ("checkpoint.every", 1, "every=1"),
    ("checkpoint.restore.cast", True, "restore=Restore(cast=True)"),
    ("checkpoint.restore.verify", "fast", 'restore=Restore(verify="fast")'),
    ("checkpoint.replicas.verify_every", 0, "replicas=Replicas(verify_every=0)"),
    ("checkpoint.keep.newest", 1, "keep=Keep(newest=1)"),
]


@pytest.mark.parametrize(("name", "value", "python"), OPTIONS)
def test_an_option_can_be_copied_into_the_program_or_the_command_line(name: str, value: Any, python: str) -> None:
    groups = {each: getattr(stagereg, each) for each in ("Restore", "Replicas", "Keep")}
    assert option(name, value) == python
    given = eval(f"dict({python})", groups)
    Checkpointer.check_options(given)
    with option_text.in_config({"checkpoint": "checkpoint"}):
        override = option(name, value)
        assert override.startswith(f"{name}=")
    found = OmegaConf.to_container(composed(override))
    for key in name.split(".")[1:]:
        found = found[key]  # type: ignore[index,call-overload]
    assert found == (str(value) if isinstance(value, Path) else value)


def test_an_option_without_a_value_names_its_class_or_its_key() -> None:
    named = ("checkpoint.every", "checkpoint.restore.cast", "join.timeout", "join.throw", "tier.dir")
    assert [*map(option, named)] == [
        "Checkpointer(every=...)",
        "Restore(cast=...)",
        "Join(timeout=...)",
        "Join(throw_on_early_termination=...)",
        "Tier(dir=...)",
    ]
    with option_text.in_config({"checkpoint": "checkpoint", "join": "join", "tier": "tier"}):
        assert [*map(option, named)] == [*named]


def test_a_component_can_be_chosen_as_the_text_says() -> None:
    assert choice("storage", "dcp") == 'storage="dcp"'
    in_python = choice("keep", "policy", newest=2)
    assert eval(f"dict({in_python})", {"stagereg": stagereg})["keep"] == stagereg.Keep(newest=2)
    with option_text.in_config({"checkpoint": "checkpoint"}):
        assert choice("tier", "disk", dir="/t") == "tier=disk tier.dir=/t"


def saved_and_refused(checkpointer: Checkpointer) -> str:
    """Return the message of a restore that finds no entry for a name of the state."""
    with contextlib.closing(checkpointer):
        checkpointer.save(1, {"model": torch.nn.Linear(2, 2)})
        checkpointer.wait()
        with pytest.raises(CheckpointError) as refused:
            checkpointer.restore({"model": torch.nn.Linear(2, 2), "other": torch.zeros(2)})
    return str(refused.value)


class Holder:
    """An object of a config whose code constructs the checkpointer itself."""

    def __init__(self, folder: str) -> None:
        self.checkpointer = Checkpointer(folder, stager="blocking")


def test_the_form_follows_from_who_has_built_the_checkpointer(tmp_path: Path) -> None:
    in_python, in_config = 'restore=Restore(allow_missing=["other"])', "checkpoint.restore.allow_missing=[other]"
    assert in_python in saved_and_refused(Checkpointer(str(tmp_path), stager="blocking"))
    cfg = composed(f"checkpoint.dir={tmp_path}")
    assert in_config in saved_and_refused(stagereg.instantiate(cfg))
    assert in_python in saved_and_refused(Checkpointer(str(tmp_path), stager="blocking"))
    nested = OmegaConf.create({"train": {"ckpt": OmegaConf.to_container(cfg, resolve=True)}})
    assert "train.ckpt.restore.allow_missing=[other]" in saved_and_refused(stagereg.instantiate(nested.train.ckpt))
    holder = {"_target_": f"{__name__}.Holder", "folder": str(tmp_path)}
    assert in_python in saved_and_refused(stagereg.instantiate(holder, allow=[Holder]).checkpointer)


def test_a_value_is_refused_under_the_name_that_the_program_has_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Checkpointer\(every=\.\.\.\) must be a whole number of at least 1, not 0"):
        Checkpointer(str(tmp_path), every=0)
    with pytest.raises(ConfigError, match=r"^Restore\(verify=\.\.\.\) must be one of full, fast, not 'ful'"):
        stagereg.Restore(verify="ful")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Join\(mode=\.\.\.\) must be one of .* Did you mean 'planned'"):
        stagereg.Join([torch.nn.Linear(2, 2)], mode="planed")
    with pytest.raises(ConfigError, match=r"^checkpoint\.every must be a whole number of at least 1, not 0"):
        stagereg.instantiate(composed("checkpoint.every=0", f"checkpoint.dir={tmp_path}"))


OF_CONFIGS = ("config", "launch", "sweep", "commands", "testing", "bench", "integrations", "cli.py")
OF_COMMAND_LINES = ("store/sweep_job.py", "base/command.py", "recovery/launching.py")
WRITTEN = re.compile(r"\b(checkpoint|join|tier)\.[a-z_.]+=|\b(stager|storage|tier|resume)=['\"\w]")


def test_no_message_of_the_library_writes_an_option_in_one_form_alone() -> None:
    found = []
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        if name.startswith(OF_CONFIGS) or name.endswith(OF_COMMAND_LINES):
            continue
        tree = ast.parse(file.read_text())
        docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docs else None
            found += [f"{name}: {text}"] if isinstance(text, str) and WRITTEN.search(text) else []
    assert found == []
