import json
import os
import shutil
from pathlib import Path

import pytest
import torch

pl = pytest.importorskip("lightning", reason="make frameworks installs it")

# ruff: noqa: E402 - only where there is Lightning
from lightning.pytorch.callbacks import ModelCheckpoint

import stagereg
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.tiers.disk import DiskTier
from stagereg.errors import CheckpointError, ConfigError
from stagereg.integrations.lightning import StageregCheckpointIO
from tests.integrations.test_lightning import Regression, checkpoints, lines, loader, quiet, start

PROGRAM = str(Path(__file__).with_name("lightning_near.py"))
NEAR = "last-near.ckpt"

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, of which a new version has others
    pytest.mark.timeout(240),
]


class Stopped(Regression):
    """Notes at which global step training begins."""

    began = None

    def on_train_start(self):
        self.began = self.global_step


def tier(folder, every=1, kind=DiskTier):
    return kind(dir=str(folder / "near"), every=every, copies=0)


def trainer(folder, *plugins, epochs=3, **more):
    checkpoint = ModelCheckpoint(folder / "ck", **{"save_last": True, **more})
    return pl.Trainer(max_epochs=epochs, callbacks=[checkpoint], plugins=list(plugins), **quiet)


def fit(folder, stop_at=-1, path="last", every=1, **more):
    """Train 12 steps, 4 an epoch, or fail in the one after ``stop_at``; return from where, and the module."""
    module = Stopped(stop_at)
    fitter = trainer(folder, StageregCheckpointIO(tier=tier(folder, every)), **more)
    if stop_at < 0:
        fitter.fit(module, loader(), ckpt_path=path)
        return module.began, module
    with pytest.raises(RuntimeError, match="on purpose"):
        fitter.fit(module, loader(), ckpt_path=path)
    return module.began, module


def steps_near(folder):
    parts = (folder / "near").glob("*/step-*/part-0.json")
    return sorted(int(path.parent.name[5:13]) for path in parts)


def weights_after_all_steps(folder):
    module = Regression()
    trainer(folder / "plain").fit(module, loader())
    return module.net.weight


# -- two ranks


def check(process, *stops):
    """Compare what each rank of the program has come to, and from where it went on."""
    found = {tuple(line.split()[1:3]): line.split(maxsplit=3)[3] for line in lines(process, "rank")}
    assert len(found) == 2 * (1 + len(stops))
    for rank in "01":
        began, to, whole = found[rank, "whole:"].partition(" to 12 epoch 3 ")
        assert (began, bool(to)) == ("from 0", True)
        for stop in stops:
            assert found[rank, f"{stop}:"] == f"from {stop} to 12 epoch 3 {whole}"


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_what_goes_on_from_the_tier_within_and_after_an_epoch_ends_bit_for_bit(tmp_path, kind):
    check(start(PROGRAM, tmp_path, kind, "{}", 3, 8), 3, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 12, "max_epochs": -1},
        {"val_check_interval": 0.5},
        {"accumulate_grad_batches": 2},
        {"max_steps": 12, "val_check_interval": 0.5},
    ],
    ids=str,
)
def test_so_it_does_however_steps_epochs_and_validations_are_counted(tmp_path, kind, options):
    check(start(PROGRAM, tmp_path, kind, json.dumps(options), 2, 4, 5), 2, 4, 5)


def test_a_killed_run_goes_on_from_its_newest_step_on_each_rank(tmp_path):
    process = start(PROGRAM, tmp_path, "ddp", json.dumps({"kill": 6}))
    process.communicate(timeout=200)
    assert process.returncode != 0
    assert checkpoints(tmp_path / "whole" / "ck") == [NEAR]
    again = lines(start(PROGRAM, tmp_path, "ddp", "{}"), "rank")
    shutil.move(tmp_path / "whole", tmp_path / "killed")
    whole = lines(start(PROGRAM, tmp_path, "ddp", "{}"), "rank")
    ends = [{line.partition(" to 12 ")[2] for line in found} for found in (again, whole)]
    assert ends[0] == ends[1]
    assert {line.split()[4] for line in again} <= {"4", "5", "6"}  # two may have been under way


# -- what goes there, and when


def test_steps_go_to_the_tier_alone_and_no_callback_takes_part(tmp_path):
    assert fit(tmp_path, 7, every=3)[0] == 0
    assert steps_near(tmp_path) == [3, 6]
    saved = trainer(tmp_path / "b", StageregCheckpointIO())
    with pytest.raises(RuntimeError, match="on purpose"):
        saved.fit(Regression(7), loader())
    assert checkpoints(tmp_path / "ck") == [*checkpoints(tmp_path / "b" / "ck")[:1], NEAR, "last.ckpt"]
    named = [len(list((folder / "ck").glob("*/step-*"))) for folder in (tmp_path, tmp_path / "b")]
    assert named == [2, 2]


def test_steps_of_the_optimizer_are_counted_and_gradients_are_none_of_a_step(tmp_path, monkeypatch):
    saved, save = [], Checkpointer.save
    monkeypatch.setattr(Checkpointer, "save", lambda self, step, state: (saved.append(step), save(self, step, state)))
    fitter = pl.Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        accumulate_grad_batches=2,
        plugins=[StageregCheckpointIO(tier=tier(tmp_path))],
        **quiet,
    )
    fitter.fit(Regression(), loader())
    assert saved == steps_near(tmp_path) == [1, 2]
    assert (tmp_path / NEAR).is_dir()  # by which one goes on where there is no ModelCheckpoint


def test_auto_saves_too(tmp_path):
    assert fit(tmp_path, 11, every="auto", save_top_k=0, save_last=False)[0] == 0
    assert fit(tmp_path, every="auto", save_top_k=0, save_last=False)[0] == 10


def test_a_tier_may_be_named_and_none_is_none(tmp_path):
    assert type(StageregCheckpointIO(tier="memory").tier).__name__ == "MemoryTier"
    assert StageregCheckpointIO(tier="none").tier is None
    with pytest.raises(ConfigError, match="tier must be a tier or the name of one"):
        StageregCheckpointIO(tier=1)


# -- what is gone on from


def test_last_is_what_was_saved_last_in_the_tier_or_beside_it(tmp_path):
    expected = weights_after_all_steps(tmp_path)
    fit(tmp_path, 6)
    assert fit(tmp_path, 9)[0] == 6  # of the tier; last.ckpt has 4
    shutil.rmtree(tmp_path / "near")
    began, module = fit(tmp_path)
    assert began == 8  # last.ckpt
    assert torch.equal(module.net.weight, expected)


def test_a_checkpoint_saved_later_than_the_tiers_newest_step_comes_first(tmp_path):
    fit(tmp_path, 9, every=3)  # which has 6 and 9
    shutil.rmtree(next((tmp_path / "near").glob("*/step-00000009*")))
    assert fit(tmp_path, every=3)[0] == 8


def test_a_path_that_is_named_is_restored_and_begins_a_branch(tmp_path):
    fit(tmp_path, 10, every=5, save_top_k=-1)
    old = tmp_path / "ck" / "epoch=0-step=4.ckpt"
    assert fit(tmp_path, 6, path=old, every=5, save_top_k=-1)[0] == 4
    assert steps_near(tmp_path) == [5]  # what the other branch had is void
    assert fit(tmp_path, every=5, save_top_k=-1)[0] == 5  # and not 8, of last.ckpt, which the old branch has saved


def test_what_another_run_calls_last_is_a_path_that_is_named(tmp_path):
    fit(tmp_path / "other", 5)
    fit(tmp_path, 7)
    assert fit(tmp_path, path=tmp_path / "other" / "ck" / "last.ckpt")[0] == 4


def test_without_a_path_training_begins_anew(tmp_path):
    fit(tmp_path, 3)
    assert fit(tmp_path, path=None)[0] == 0


def test_last_needs_no_checkpoint_that_is_called_so(tmp_path):
    fit(tmp_path, 3, save_top_k=0, save_last=False)
    assert fit(tmp_path, 6, save_top_k=1, save_last=False)[0] == 3
    shutil.rmtree(tmp_path / "near")
    assert fit(tmp_path, save_last=False)[0] == 4


def test_a_tier_that_was_lost_before_the_first_checkpoint_lets_training_begin(tmp_path, caplog):
    fit(tmp_path, 3)
    shutil.rmtree(tmp_path / "near")
    assert fit(tmp_path)[0] == 0
    assert "training starts from scratch" in caplog.text


def test_a_tier_with_nothing_good_gives_way_to_the_checkpoint(tmp_path, caplog):
    fit(tmp_path, 6)
    for file in (tmp_path / "near").glob("*/step-*/*.distcp"):
        file.write_bytes(bytes(len(file.read_bytes())))
    assert fit(tmp_path, 7)[0] == 4
    assert "the tier has nothing good" in caplog.text


def test_a_tier_with_nothing_good_is_an_error_where_nothing_else_is(tmp_path):
    fit(tmp_path, 3)
    for file in (tmp_path / "near").glob("*/step-*/*.distcp"):
        file.write_bytes(bytes(len(file.read_bytes())))
    module = Stopped()
    with pytest.raises(CheckpointError, match="none of them is good"):
        trainer(tmp_path, StageregCheckpointIO(tier=tier(tmp_path))).fit(module, loader(), ckpt_path="last")
    assert module.began is None


def test_files_of_lightning_come_first_if_they_have_gone_further(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path).fit(Regression(6), loader())
    assert fit(tmp_path, 7)[0] == 4  # the file
    assert (tmp_path / "ck" / NEAR).stat().st_mtime == 0  # so that Lightning takes no other one for older
    assert fit(tmp_path, 7)[0] == 7  # the tier
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, epochs=5).fit(Regression(10), loader(), ckpt_path=tmp_path / "ck" / "last.ckpt")
    assert fit(tmp_path)[0] == 8


def test_what_is_validated_as_last_is_a_checkpoint_not_a_step_of_the_tier(tmp_path):
    fit(tmp_path, 6, save_last=False)
    module, fitter = Regression(), trainer(tmp_path, StageregCheckpointIO(tier=tier(tmp_path)))
    fitter.test(module, loader(), ckpt_path="last", verbose=False)
    saved = StageregCheckpointIO().load_checkpoint(tmp_path / "ck" / "epoch=0-step=4.ckpt")["state_dict"]
    assert torch.equal(module.net.weight, saved["net.weight"])


# -- failures, and the end


class Full(DiskTier):
    """Has no room."""

    def lacking(self, nbytes):
        return "it is full"


def test_a_tier_that_fails_stops_no_training(tmp_path, caplog):
    module, fitter = Regression(), trainer(tmp_path, StageregCheckpointIO(tier=tier(tmp_path, kind=Full)))
    fitter.fit(module, loader())
    assert torch.equal(module.net.weight, weights_after_all_steps(tmp_path))
    assert "it is full" in caplog.text
    assert checkpoints(tmp_path / "ck")[-1] == "last.ckpt"


def test_the_tier_is_empty_after_a_fit_that_ended_well_with_all_of_it_saved(tmp_path):
    fit(tmp_path)
    assert os.listdir(tmp_path / "near") == []
    assert fit(tmp_path)[0] is None  # it goes on from the end, where no step is left


@pytest.mark.parametrize("why", ["nothing was saved", "not as far", "elsewhere"])
def test_the_tier_stays_where_it_alone_has_the_last_step(tmp_path, why):
    module, more = Regression(), {"every_n_epochs": 2} if why == "not as far" else {"save_top_k": 0, "save_last": False}
    fitter = trainer(tmp_path, StageregCheckpointIO(tier=tier(tmp_path)), **more)
    if why == "elsewhere":
        module.on_train_end = lambda: fitter.save_checkpoint(tmp_path / "elsewhere.ckpt")
    fitter.fit(module, loader())
    assert steps_near(tmp_path)[-1] == 12


def test_the_tier_stays_where_the_last_checkpoint_has_failed(tmp_path):
    class Failing(type(stagereg.build("storage", "dcp"))):
        def write_data(self, plan, planner):
            raise OSError(28, "No space left on device")

    plugin = StageregCheckpointIO(tier=tier(tmp_path), storage=Failing())
    with pytest.raises(CheckpointError, match="No space left"):
        trainer(tmp_path, plugin, epochs=1).fit(Regression(), loader())
    assert steps_near(tmp_path)[-1] == 4
    assert fit(tmp_path)[0] == 4


def test_one_plugin_serves_one_fit_after_the_other(tmp_path):
    plugin = StageregCheckpointIO(tier=tier(tmp_path))
    for epochs in (1, 2):
        fitter, module = trainer(tmp_path, plugin, epochs=epochs, save_top_k=0, save_last=False), Stopped()
        fitter.fit(module, loader(), ckpt_path="last")
        assert steps_near(tmp_path)[-1] == 4 * epochs
    assert module.began == 4


def test_fabric_has_no_tier_and_says_why():
    with pytest.raises(ConfigError, match=r"Fabric calls nobody at the end of a step.*maybe_save in your loop"):
        pl.Fabric(accelerator="cpu", devices=1, plugins=[StageregCheckpointIO(tier="memory")])
