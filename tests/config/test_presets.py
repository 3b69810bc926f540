"""Where a decision of checkpoints has a name, that name is an option; what it sets can still be set by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import stagereg


def composed(folder: Path, *overrides: str) -> dict[str, Any]:
    (folder / "app.yaml").write_text("defaults: [stagereg, _self_]\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        config = compose("app", list(overrides))
    return {
        name: OmegaConf.to_container(config.checkpoint[name])
        if OmegaConf.is_config(config.checkpoint[name])
        else config.checkpoint[name]
        for name in ("restore", "keep")
    }


@pytest.mark.parametrize(
    ("overrides", "group", "differ"),
    [
        (["checkpoint/restore=safe"], "restore", {}),
        (["checkpoint/restore=fast"], "restore", {"verify": "fast"}),
        (["checkpoint/restore=bucket"], "restore", {"read": "once"}),
        (["checkpoint/restore=bucket", "checkpoint.restore.read=each"], "restore", {"read": "each"}),
        (["checkpoint/keep=newest"], "keep", {}),
        (["checkpoint/keep=best"], "keep", {"newest": 1, "best": 3, "metric": "loss"}),
        (["checkpoint/keep=best", "checkpoint.keep.best=1"], "keep", {"newest": 1, "best": 1, "metric": "loss"}),
    ],
)
def test_a_preset_sets_what_it_is_for_and_nothing_else(
    tmp_path: Path, overrides: list[str], group: str, differ: dict[str, Any]
) -> None:
    usual, found = composed(tmp_path), composed(tmp_path, *overrides)
    assert found.pop(group) == {**usual.pop(group), **differ}
    assert found == usual


def test_a_number_still_says_how_many_are_kept(tmp_path: Path) -> None:
    assert composed(tmp_path, "checkpoint.keep=5")["keep"] == 5


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.restore.rename={a: inp, b.0: c}", "checkpoint.restore.allow_missing=[c.*,scheduler]"],
        ["+checkpoint.restore.rename.a=inp", "+checkpoint.restore.rename.b.0=c"],
        ["checkpoint.restore.rename.a=inp", "checkpoint.restore.rename.b.0=c"],
    ],
)
def test_names_of_layers_may_be_given_on_the_command_line(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, _self_]\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app", [f"checkpoint.dir={tmp_path}/c", "checkpoint.every=1", *overrides])
    with stagereg.instantiate(config.checkpoint) as checkpointer:
        assert checkpointer.restore_options.rename == {"a": "inp", "b.0": "c"}
        assert checkpointer.restore_options.allow_missing == (
            ("c.*", "scheduler") if "allow_missing" in overrides[1] else ()
        )


def test_of_two_presets_the_last_one_counts(tmp_path: Path) -> None:
    found = composed(tmp_path, "checkpoint/restore=fast", "checkpoint/restore=bucket")
    assert found["restore"] == composed(tmp_path, "checkpoint/restore=bucket")["restore"]


def test_a_checkpointer_that_is_chosen_off_takes_the_same_options_and_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text('defaults: [stagereg, {override checkpoint: "off"}, _self_]\n')
    (tmp_path / "on.yaml").write_text("defaults: [stagereg, _self_]\n")
    options = [f"checkpoint.dir={tmp_path}/c", "checkpoint.every=1", "checkpoint/restore=fast"]
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        configs = [compose("app", options), compose("on", [*options, "checkpoint=off"])]
    assert configs[0] == configs[1]
    with stagereg.instantiate(configs[0].checkpoint) as checkpointer:
        assert isinstance(checkpointer, stagereg.Checkpointer)
        assert checkpointer.restore({"x": 0}) is None
        assert not checkpointer.maybe_save(1, {"x": 1})
    assert not (tmp_path / "c").exists()
