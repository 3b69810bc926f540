import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning", reason="make frameworks installs it")

# ruff: noqa: E402 - only where there is Lightning
import stagereg
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError, InstallationError
from stagereg.integrations.lightning import StageregCheckpointIO
from stagereg.integrations.lightning_strategies import WholeSaving
from stagereg.integrations.named import NamedCheckpoints
from stagereg.stagers.blocking import BlockingAsyncStager

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/integrations/lightning_train.py")
SHARDED = str(Path(__file__).with_name("lightning_sharded.py"))
RESUMED = str(Path(__file__).with_name("lightning_resume.py"))
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, of which a new version has others
    pytest.mark.timeout(240),
]


def start(program: str, *arguments: object, ranks: int = 2) -> subprocess.Popen:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *torchrun, program, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **pipes, env=ENVIRONMENT, text=True, start_new_session=True)


def lines(process: subprocess.Popen, word: str) -> set[str]:
    """Return the lines that begin with ``word`` and that a program has printed at its end."""
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text[-5000:]
    return {line for line in text.splitlines() if line.startswith(word)}


def weights(process: subprocess.Popen) -> str:
    (line,) = lines(process, "weights ")
    return line


class Regression(pl.LightningModule):
    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.stop_at = stop_at

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        if self.global_step == self.stop_at:
            raise RuntimeError("stopped on purpose")
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def loader():
    return DataLoader(TensorDataset(torch.arange(32.0).view(8, 4)), batch_size=2)


def trainer(folder, *plugins, epochs=3, **more):
    checkpoint = pl.pytorch.callbacks.ModelCheckpoint(folder, **{"save_last": True, **more})
    return pl.Trainer(max_epochs=epochs, callbacks=[checkpoint], plugins=list(plugins), **quiet)


def trained(folder, *plugins, **more):
    module, fitter = Regression(), trainer(folder, *plugins, **more)
    fitter.fit(module, loader(), ckpt_path="last")
    return module, fitter


def checkpoints(folder):
    return sorted(path.name for path in Path(folder).glob("*.ckpt"))


# -- two ranks


def test_resumed_training_ends_bit_for_bit_as_uninterrupted(tmp_path):
    whole, first = start(EXAMPLE, "--dir", tmp_path / "a"), start(EXAMPLE, "--dir", tmp_path / "b", "--epochs", 2)
    expected, _ = weights(whole), weights(first)
    assert weights(start(EXAMPLE, "--dir", tmp_path / "b")) == expected
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b")
    kill_and_go_on(tmp_path / "c", expected, seed=1)


def kill_and_go_on(folder, expected, seed):
    killed = start(EXAMPLE, "--dir", folder)
    drawn = random.Random(seed)
    number, until = drawn.randint(1, 7), time.monotonic() + 100
    while killed.poll() is None and time.monotonic() < until and not list(folder.glob(f".stagereg/*{number:08d}*")):
        time.sleep(0.001)
    time.sleep(drawn.random() * 0.05)
    if killed.poll() is None:
        os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    assert killed.returncode in (-signal.SIGKILL, 0)  # on a busy machine it may have ended before it was looked at
    for path in folder.glob("*.ckpt"):  # complete or absent
        assert not path.exists() or stagereg.open_checkpoint(path, verify=True).verified
    assert weights(start(EXAMPLE, "--dir", folder)) == expected
    assert all(path.exists() for path in folder.glob("*.ckpt"))
    assert sorted(os.listdir(folder / ".stagereg")) == ["latest"]


def test_sharded_models_resume_bit_for_bit(tmp_path):
    for line in check_sharded(start(SHARDED, tmp_path / "two")):
        _, resumed, whole = line.replace("resumed", "whole").split(" whole ")
        assert resumed == whole


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_random_numbers_of_each_rank_go_on_after_and_within_an_epoch(tmp_path, kind):
    found = {
        tuple(line.split()[1:3]): line.split(maxsplit=3)[3] for line in lines(start(RESUMED, tmp_path, kind), "rank")
    }
    for rank in "01":
        whole = found[rank, "whole:"]
        assert whole.startswith("step 12 ")
        assert found[rank, "end:"] == found[rank, "middle:"] == whole


@pytest.mark.slow
def test_shards_are_read_by_another_number_of_ranks(tmp_path):
    two = {line.split()[0]: line.split()[2] for line in check_sharded(start(SHARDED, tmp_path))}
    one = check_sharded(start(SHARDED, tmp_path, "-", ranks=1))  # which finds all trained, and only loads it
    assert {line.split()[0]: line.split()[2] for line in one} == two


def check_sharded(process):
    found = lines(process, "by_")
    assert {line.split()[0] for line in found} == {"by_trainer", "by_fabric"}
    return found


# -- one process


def test_resumed_state_equals_that_of_lightning_itself(tmp_path, caplog):
    plain = trained(tmp_path / "a")[1].optimizers[0].state_dict()
    trained(tmp_path / "b", StageregCheckpointIO(), epochs=1)
    _, fitter = trained(tmp_path / "b", StageregCheckpointIO())
    assert fitter.global_step == 12
    assert "NO STEP" not in caplog.text
    assert str(fitter.optimizers[0].state_dict()) == str(plain)
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b")


def test_best_k_stay_and_no_others(tmp_path):
    _, plain = trained(tmp_path / "a", epochs=5, monitor="loss", mode="max", save_top_k=2)
    _, fitter = trained(tmp_path / "b", StageregCheckpointIO(), epochs=5, monitor="loss", mode="max", save_top_k=2)
    assert checkpoints(tmp_path / "b") == checkpoints(tmp_path / "a")
    assert len(list((tmp_path / "b").glob("*/step-*"))) == 3
    assert all(stagereg.open_checkpoint(path, verify=True) for path in (tmp_path / "b").glob("*.ckpt"))
    best = Path(fitter.checkpoint_callback.best_model_path).name
    assert best == Path(plain.checkpoint_callback.best_model_path).name


def test_equal_names_get_versions_as_without(tmp_path):
    for folder, plugins in (("a", []), ("b", [StageregCheckpointIO()])):
        trained(tmp_path / folder, *plugins, monitor="loss", save_top_k=3, filename="best", save_last=False)
    assert checkpoints(tmp_path / "b") == checkpoints(tmp_path / "a") == ["best-v1.ckpt", "best-v2.ckpt", "best.ckpt"]


def test_linked_last_is_loaded(tmp_path):
    trained(tmp_path, StageregCheckpointIO(), epochs=1, save_last="link")
    assert os.readlink(tmp_path / "last.ckpt").startswith("epoch=0")
    assert trained(tmp_path, StageregCheckpointIO(), epochs=2, save_last="link")[1].global_step == 8


def test_best_is_tested_after_fit(tmp_path):
    found = []
    for folder, plugins in (("a", []), ("b", [StageregCheckpointIO()])):
        module, fitter = trained(tmp_path / folder, *plugins, monitor="loss")
        last = module.net.weight.clone()
        fitter.test(module, loader(), ckpt_path="best", verbose=False)
        found.append(module.net.weight.clone())
    assert not torch.equal(last, found[0])
    assert torch.equal(*found)


def test_exception_of_the_loop_leaves_good_checkpoints(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, StageregCheckpointIO()).fit(Regression(stop_at=5), loader())
    assert trained(tmp_path, StageregCheckpointIO())[1].global_step == 12


@pytest.mark.parametrize("epochs", [1, 3])
def test_failed_write_is_raised_by_fit(tmp_path, epochs):
    class Failing(type(stagereg.build("storage", "dcp"))):
        def write_data(self, plan, planner):
            raise OSError(28, "No space left on device")

    module = Regression()
    with pytest.raises(CheckpointError, match="No space left"):
        trainer(tmp_path, StageregCheckpointIO(storage=Failing()), epochs=epochs).fit(module, loader())
    assert checkpoints(tmp_path) == []


def test_what_lightning_removes_stays_until_the_next_is_complete(tmp_path):
    folder = str(tmp_path)
    named = NamedCheckpoints(folder, True, {})
    named.save({"a": torch.zeros(3)}, named.begin("one.ckpt"))
    named.checkpointer.wait()
    seen, move = [], Path.rename

    def moves(path, target):
        seen.append((tmp_path / "one.ckpt").exists())
        return move(path, target)

    io = StageregCheckpointIO()
    io._directories[folder] = named
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", moves)
        named.save({"a": torch.ones(3)}, named.begin("two.ckpt"))
        io.remove_checkpoint(tmp_path / "one.ckpt")
        io.teardown()
    assert seen == [True, True]  # of the new one to its place, and then of the old one
    assert checkpoints(tmp_path) == ["two.ckpt"]
    assert len(list(tmp_path.glob("*/step-*"))) == 1


def test_saved_again_replaces_what_was_there_when_complete(tmp_path):
    io = StageregCheckpointIO()
    for value in (1.0, 2.0):
        tensor = torch.full((3,), value)
        io.save_checkpoint({"a": tensor, "n": value}, tmp_path / "last.ckpt")
        tensor.zero_()
    io.teardown()
    assert StageregCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["n"] == 2.0
    assert os.listdir(tmp_path / "last.ckpt") == ["step-00000002"]


def test_copied_moved_and_deleted_like_any_directory(tmp_path):
    io = StageregCheckpointIO()
    io.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt")["n"] == 1
    subprocess.run(["cp", "-r", tmp_path / "a.ckpt", tmp_path / "elsewhere"], check=True)
    subprocess.run(["mv", tmp_path / "a.ckpt", tmp_path / "b.ckpt"], check=True)
    io.save_checkpoint({"n": 2}, tmp_path / "a.ckpt")
    found = [io.load_checkpoint(tmp_path / name)["n"] for name in ("a.ckpt", "b.ckpt", "elsewhere")]
    assert found == [2, 1, 1]
    io.remove_checkpoint(tmp_path / "b.ckpt")
    shutil.rmtree(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == [".stagereg", "elsewhere"]
    io.save_checkpoint({"n": 3}, tmp_path / "a.ckpt")
    io.teardown()
    assert io.load_checkpoint(tmp_path / "a.ckpt")["n"] == 3


def test_what_slurm_requeues_is_complete_when_saved(tmp_path):
    io = StageregCheckpointIO()
    io.save_checkpoint({"a": torch.zeros(1 << 20), "n": 1}, tmp_path / "hpc_ckpt_1.ckpt")
    assert stagereg.open_checkpoint(tmp_path / "hpc_ckpt_1.ckpt", verify=True).entry("n") == 1
    io.teardown()


KILLED = """
import os, signal, sys
from stagereg.integrations.named import NamedCheckpoints

named, left = NamedCheckpoints(sys.argv[1], True, {}), int(sys.argv[2])

def save(value):
    named.save({"value": value}, named.begin("x.ckpt"))

def kill(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "ctypes.dlsym"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

save(1)
named.checkpointer.wait()
sys.addaudithook(kill)
save(2)
named.checkpointer.wait()
named.remove("x.ckpt")
save(3)
named.close()
"""


def killed_at(folder, changes):
    command = [sys.executable, "-c", KILLED, str(folder), str(changes)]
    return subprocess.Popen(command, env=ENVIRONMENT)


@pytest.mark.parametrize("first", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, *range(2, 15)))])
def test_killed_at_any_change_leaves_the_old_or_the_new(tmp_path, first):
    """Of the some forty changes of names, a few in one test."""
    killed = {at: killed_at(tmp_path / str(at), at) for at in range(first, 60, 15)}
    left = []
    for at, process in killed.items():
        ended = process.wait(timeout=150)
        path = tmp_path / str(at) / "x.ckpt"
        there = os.path.exists(path) and stagereg.open_checkpoint(path, verify=True).entry("value")
        left.append(there)
        assert ended in (0, -signal.SIGKILL)
        named = NamedCheckpoints(str(path.parent), True, {})
        named.save({"value": 4}, named.begin("x.ckpt"))
        named.close()
        assert len(os.listdir(path)) == 1
        assert StageregCheckpointIO().load_checkpoint(path)["value"] == 4
        assert os.listdir(path.parent / ".stagereg") == ["latest"]
    assert {3} <= set(left) <= {1, 2, 3, False}
    assert 1 in left or first > 4  # the fifth change moves the second save to its path


def test_path_that_cannot_be_moved_is_an_error(tmp_path, monkeypatch):
    def fails(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(CheckpointError, match=r"a rename or deletion in .* failed"):
        trained(tmp_path, StageregCheckpointIO(), epochs=1)


def test_isolation_by_a_blocking_stager(tmp_path):
    io = StageregCheckpointIO(stager=BlockingAsyncStager())
    tensor = torch.ones(3)
    io.save_checkpoint({"a": tensor}, tmp_path / "x.ckpt")
    tensor.zero_()
    assert torch.equal(io.load_checkpoint(tmp_path / "x.ckpt")["a"], torch.ones(3))
    io.teardown()
    with pytest.raises(ConfigError, match="only one directory and one fit"):
        io.save_checkpoint({"a": tensor}, tmp_path / "y.ckpt")


def damage(path):
    file = next(path.resolve().glob("*/*.distcp"))
    file.write_bytes(file.read_bytes()[:-20] + b"x" * 20)


def test_damaged_last_falls_back_to_the_newest_good(tmp_path, caplog):
    trained(tmp_path, StageregCheckpointIO(), epochs=2, save_top_k=-1)
    damage(tmp_path / "last.ckpt")
    _, fitter = trained(tmp_path, StageregCheckpointIO())
    assert fitter.global_step == 12
    assert "stagereg: skipped" in caplog.text
    damage(tmp_path / "last.ckpt")
    best = Path(fitter.checkpoint_callback.best_model_path)
    damage(best)
    with pytest.raises(CheckpointError, match="CRC-32 mismatch"):
        trainer(tmp_path, StageregCheckpointIO()).test(Regression(), loader(), ckpt_path=best)


def test_files_of_lightning_are_read_and_replaced(tmp_path):
    trained(tmp_path, epochs=1)
    assert (tmp_path / "last.ckpt").is_file()
    _, fitter = trained(tmp_path, StageregCheckpointIO(), epochs=2)
    assert fitter.global_step == 8
    assert (tmp_path / "last.ckpt").is_dir()
    assert len(list(tmp_path.glob("*/step-*"))) == 2
    assert sorted(os.listdir(tmp_path)) == [".stagereg", *checkpoints(tmp_path)]


def test_converted_file_is_one_that_lightning_loads(tmp_path):
    module, _ = trained(tmp_path, StageregCheckpointIO(), epochs=1)
    command = [sys.executable, "-m", "stagereg", "convert", tmp_path / "last.ckpt", tmp_path / "out.pt"]
    subprocess.run(command, check=True, env=ENVIRONMENT, timeout=60)
    loaded = Regression.load_from_checkpoint(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(loaded.net.weight, module.net.weight)


def test_what_is_read_at_a_path_goes_with_a_later_save(tmp_path):
    io = StageregCheckpointIO()

    def save(number):
        io.save_checkpoint({"n": number}, tmp_path / "last.ckpt")
        io.teardown()
        return sorted(path.name for path in (tmp_path / "last.ckpt").glob("step-*"))

    assert save(1) == ["step-00000001"]
    store = open_store(tmp_path / "last.ckpt")
    with store.readers.read_lease(f"{store.root}/step-00000001"):
        assert save(2) == ["step-00000001", "step-00000002"]
        assert io.load_checkpoint(tmp_path / "last.ckpt") == {"n": 2}
    assert save(3) == ["step-00000003"]


def test_ranks_that_lightning_spawns_hand_over_their_weights(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONPATH"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    ends = []
    for folder, plugins in (("a", []), ("b", [StageregCheckpointIO()])):
        torch.manual_seed(0)
        module, callback = Regression(), pl.pytorch.callbacks.ModelCheckpoint(tmp_path / folder, save_last=True)
        spawning = {"strategy": "ddp_spawn", "devices": 2, "max_epochs": 2, "callbacks": [callback]}
        pl.Trainer(plugins=plugins, **spawning, **quiet).fit(module, loader())
        ends.append(module.net.weight)
    assert torch.equal(*ends)
    saved = StageregCheckpointIO().load_checkpoint(tmp_path / "b" / "last.ckpt")["state_dict"]["net.weight"]
    assert torch.equal(saved, ends[1])


def test_fabric_saves_and_loads(tmp_path, caplog):
    fabric = pl.Fabric(accelerator="cpu", devices=1, plugins=[StageregCheckpointIO()])
    model = fabric.setup(torch.nn.Linear(2, 2))
    kept = model.weight.detach().clone()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "step": 3})
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "step": 0}
    assert fabric.load(tmp_path / "a.ckpt", state) == {}
    assert state["step"] == 3
    assert torch.equal(model.weight, kept)
    assert "state dicts instead of objects" not in caplog.text  # the program gave its objects


def test_storage_options_are_refused_on_ranks_that_only_follow():
    class Following:
        is_global_zero = False

        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            pass

        def broadcast(self, answer):
            raise AssertionError("rank 0 has raised, and answers no more")

    io = StageregCheckpointIO()
    io._strategy = Following()
    with pytest.raises(ConfigError, match="does not support storage_options"):
        WholeSaving(io, io._strategy).save_checkpoint({}, "a.ckpt", storage_options={"a": 1})


def test_two_trainers_of_a_process_save_to_one_directory(tmp_path):
    ios = [StageregCheckpointIO(), StageregCheckpointIO()]
    for n in range(4):
        ios[n % 2].save_checkpoint({"a": torch.zeros(1 << 20), "n": n}, tmp_path / f"{n % 3}.ckpt")
        assert ios[1 - n % 2].load_checkpoint(tmp_path / f"{n % 3}.ckpt")["n"] == n
    ios[0].remove_checkpoint(tmp_path / "1.ckpt")
    for io in ios:
        io.teardown()
    assert checkpoints(tmp_path) == ["0.ckpt", "2.ckpt"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        *(
            (name, "Lightning decides it with")
            for name in ("dir", "every", "keep", "resume", "preemption", "save_last")
        ),
        ("on_commit", "`stagereg follow DIR/last.ckpt -- COMMAND`"),
        ("restor", "Did you mean 'restore'"),
    ],
)
def test_options_that_are_lightnings_are_refused(name, advice):
    with pytest.raises(ConfigError, match=advice):
        StageregCheckpointIO(**{name: 1})


def test_strategies_that_cannot_be_served_are_refused(tmp_path):
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Own(DDPStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            pass

    one_file = ModelParallelStrategy(save_distributed_checkpoint=False)
    for strategy, text in ((Own(), "writes its own checkpoints"), (one_file, "False of ModelParallelStrategy")):
        with pytest.raises(ConfigError, match=text):
            pl.Trainer(strategy=strategy, plugins=[StageregCheckpointIO()], devices=1, **quiet)
    with pytest.raises(ConfigError, match="Remove AsyncCheckpointIO"):
        pl.Trainer(plugins=[AsyncCheckpointIO(StageregCheckpointIO())], **quiet)
    with pytest.raises(NotImplementedError, match="does not support setting"):  # as without
        FabricModelParallel(lambda *_: None).checkpoint_io = AsyncCheckpointIO()
    with pytest.raises(ConfigError, match="is a URL"):
        StageregCheckpointIO().save_checkpoint({}, "s3://bucket/a.ckpt")


def test_changed_lightning_is_named_with_both_versions(monkeypatch):
    from lightning.pytorch.strategies import Strategy

    monkeypatch.setattr(Strategy, "save_checkpoint", lambda self, checkpoint: None)
    with pytest.raises(
        InstallationError, match=rf"lightning {pl.__version__} is not supported: .* save_checkpoint.*>=2\.5,<2\.7"
    ):
        StageregCheckpointIO()
