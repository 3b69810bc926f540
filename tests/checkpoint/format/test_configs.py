"""Configs of OmegaConf come back as they were, or are refused by name."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.configs import of_type
from stagereg.checkpoint.format.encoding import decode, encode
from stagereg.errors import CheckpointError
from stagereg.testing.ranks import run_ranks
from tests.support.reading import opened

TEXTS = st.sampled_from(["", "a", "${lr}", "${oc.env:HOME}", "${no_resolver:1}", "???", "x ${a.b} y"])
VALUES = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.binary(max_size=3))
KEYS = st.one_of(st.sampled_from(["lr", "a", "b"]), st.integers(0, 3))
CONTENT = st.recursive(
    VALUES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=8
)
FLAGS = st.sampled_from([None, True, False])


@given(st.one_of(st.dictionaries(KEYS, CONTENT, max_size=3), st.lists(CONTENT, max_size=3)), FLAGS, FLAGS)
def test_any_config_comes_back_as_it_was(content: Any, struct: bool | None, readonly: bool | None) -> None:
    config = OmegaConf.create(content)
    OmegaConf.set_struct(config, struct)
    OmegaConf.set_readonly(config, readonly)
    read = decode(json.loads(encode(config, "cfg").text), "cfg")
    assert type(read) is type(config)
    assert OmegaConf.to_container(read) == OmegaConf.to_container(config)
    assert (OmegaConf.is_struct(read), OmegaConf.is_readonly(read)) == (struct, readonly)


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    steps: int = MISSING
    warmup_lr: float = "${lr}"  # type: ignore[assignment]


def save(path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(path, every=1) as c:
        c.save(1, state)


def restore(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with Checkpointer(path, every=1) as c:
        c.restore(state)
    return state


def test_configs_come_back_anywhere_in_the_state(tmp_path: Path) -> None:
    config = OmegaConf.create({"lr": 0.1, "warmup_lr": "${lr}", "missing": "???", "list": [1, {"a": "${lr}"}]})
    save(
        tmp_path,
        {"cfg": config, "plain": {"deep": [ListConfig([1, "${x}"]), {"cfg": config}]}, "none": DictConfig(None)},
    )
    found = restore(tmp_path, {"cfg": config, "plain": {}, "none": 0})
    for each in found["cfg"], found["plain"]["deep"][1]["cfg"]:
        assert isinstance(each, DictConfig)
        assert each.warmup_lr == 0.1
        assert OmegaConf.is_missing(each, "missing")
        assert OmegaConf.is_interpolation(each, "warmup_lr")
    assert found["none"] == DictConfig(None)
    with opened(tmp_path) as checkpoint:
        assert isinstance(checkpoint.entry("cfg"), DictConfig)


def test_a_structured_config_gets_its_class_from_the_program(tmp_path: Path) -> None:
    save(tmp_path, {"cfg": OmegaConf.merge(OmegaConf.structured(Optimizer), {"lr": 0.5})})
    typed = restore(tmp_path, {"cfg": OmegaConf.structured(Optimizer)})["cfg"]
    assert OmegaConf.get_type(typed) is Optimizer
    assert (typed.lr, typed.warmup_lr, OmegaConf.is_missing(typed, "steps")) == (0.5, 0.5, True)
    plain = restore(tmp_path, {"cfg": None})["cfg"]
    assert (type(plain), OmegaConf.get_type(plain), plain.warmup_lr) == (DictConfig, dict, 0.5)


def test_what_a_config_of_others_says_is_fit_to_be_printed(caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create({"lr\x1b[2J": 1})
    assert of_type(OmegaConf.structured(Optimizer), config) is config
    assert r"lr\x1b[2J" in caplog.text
    assert "\x1b" not in caplog.text


class Colour(enum.Enum):
    RED = 1


WHOLE = OmegaConf.create({"lr": 1, "part": {"lr": "${lr}"}, "other": {"rate": "${lr}"}})
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "enum": (lambda: OmegaConf.create({"e": Colour.RED}), "to_container"),
    "path": (lambda: OmegaConf.create([pathlib.Path("a")]), "to_container"),
    "a part that refers to the rest": (lambda: WHOLE.other, "part of a config"),
    "a part with another value of the name": (lambda: WHOLE.part, "part of a config"),
    "ChainMap": (lambda: collections.ChainMap({"a": 1}), r"save dict\(x\)"),
    "UserDict": (lambda: collections.UserDict({"a": 1}), r"save dict\(x\)"),
    "defaultdict": (lambda: collections.defaultdict(int, {"a": 1}), r"save dict\(x\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_come_back_otherwise_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(CheckpointError, match=f"'v.x' would not load back.*{message}"):
        save(tmp_path, {"v": {"x": make()}})


def configs_that_differ(rank: int, world_size: int, path: str) -> None:
    config = OmegaConf.create({"rank": rank, "same": "${rank}", "empty": {}})
    save(Path(path), {"cfg": config, "list": ListConfig([rank])})
    found = restore(Path(path), {"cfg": None, "list": None})
    assert (found["cfg"].same, found["list"]) == (rank, [rank])


def test_each_rank_gets_its_own_config(tmp_path: Path) -> None:
    run_ranks(configs_that_differ, nproc=2, args=(str(tmp_path),))
