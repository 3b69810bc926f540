import subprocess
import sys
from pathlib import Path

import pytest

pl = pytest.importorskip("lightning", reason="make frameworks installs it")

# ruff: noqa: E402 - only where there is Lightning
from stagereg.errors import JoinError
from stagereg.integrations.lightning import UnevenInputs
from stagereg.integrations.lightning_uneven import JoinedLoader

from .test_lightning import ENVIRONMENT

PROGRAM = str(Path(__file__).with_name("lightning_uneven.py"))
CASES = ("ddp", "accumulated", "resumed", "sharded", "stream", "failing")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [sys.executable, *torchrun, PROGRAM, str(tmp_path_factory.mktemp("uneven")), *CASES]
    done = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, timeout=250)
    lines = {case: [line for line in done.stdout.splitlines() if line.startswith(f"{case} ")] for case in CASES}
    assert all(lines.values()), done.stdout[-3000:] + done.stderr[-3000:]
    return lines


@pytest.mark.parametrize("case", ["ddp", "accumulated", "resumed", "sharded"])
def test_weights_are_those_of_one_process(printed, case):
    (line,) = printed[case]
    *_, off, drift = line.split()
    assert float(off) < 1e-6
    assert drift == "same"


def test_loader_without_length_is_refused_on_all_ranks(printed):
    assert sum("JoinError The train loader of rank 0 has no length" in line for line in printed["stream"]) == 3


def test_rank_that_fails_is_named_on_the_others(printed):
    assert sum("PeerFailedError rank 1 failed: ValueError: of rank 1" in line for line in printed["failing"]) == 2
    assert sum("rank 1 ValueError of rank 1" in line for line in printed["failing"]) == 1


def test_manual_optimization_is_refused():
    class Manual(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    trainer = pl.Trainer(accelerator="cpu", strategy="ddp", devices=2, logger=False)
    with pytest.raises(JoinError, match="automatic_optimization"):
        UnevenInputs().setup(trainer, Manual(), "fit")


@pytest.mark.parametrize(("done", "left"), [(2, ([2, 3], 1)), (4, ([], 3)), (6, ([], 3))])
def test_a_rank_that_had_no_data_left_at_the_save_goes_on_with_empty_batches(done: int, left: object) -> None:
    """Of a loader with four batches; an empty one is made from the last batch that is dropped."""
    loader = JoinedLoader(range(4), 6, lambda rest, example=None: iter((list(rest), example)))
    loader.skip = done
    assert tuple(loader) == left
    assert tuple(loader) == ([0, 1, 2, 3], None), "the next epoch has all"
