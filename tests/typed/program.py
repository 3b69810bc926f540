"""A small typed program as type checkers of a user see it; never run: ``make dist`` has mypy and pyright read it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, assert_type

import torch
from omegaconf import DictConfig
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader

import stagereg
from stagereg import AsyncStager, ByteSize, Checkpointer, DcpReader, DcpWriter, Join, Joinable, JoinHook, Restore


@stagereg.register("stager", "typed")
class Typed(AsyncStager):
    """A stager of the user's; what ``register`` returns is the class itself."""

    def __init__(self, limit: ByteSize = ByteSize("4GiB")) -> None:  # noqa: B008
        self.limit = limit

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: x.clone() for name, x in state_dict.items()}

    def close(self) -> None: ...


@stagereg.main(config_path="conf", config_name="train")
def train(cfg: DictConfig) -> float:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader: DataLoader[torch.Tensor] = DataLoader([torch.ones(2)])  # type: ignore[arg-type]
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    join = Join([model, optimizer], throw_on_early_termination=True)
    fast = Restore(verify="fast")
    with Checkpointer("runs", every="auto", keep=3, stager=Typed(), restore=fast) as checkpointer, join:
        assert_type(checkpointer, Checkpointer)
        step = assert_type(checkpointer.restore(state), int | None) or 0
        for batch in join.iterate(loader):
            loss = assert_type(join.mean(model(batch).sum(), len(batch)), torch.Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            step += 1
            assert_type(checkpointer.maybe_save(step, state), bool)
            stagereg.log(step, loss=loss)
        assert_type(checkpointer.latest, Path | str | None)
        assert_type(checkpointer.stats.saves, int)
    return 0.0


class Counts(Joinable):
    """A joinable of the user's."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return None


def others() -> None:
    assert_type(Typed(ByteSize("1KiB")).limit, ByteSize)
    assert_type(stagereg.names("stager"), list[str])
    with stagereg.open_checkpoint("runs", verify=True) as checkpoint:
        assert_type(checkpoint["model.weight"], torch.Tensor)
    save({}, storage_writer=DcpWriter("saved"))
    load({}, storage_reader=DcpReader("saved"))
    try:
        train()
    except (stagereg.CheckpointError, stagereg.ConfigError, stagereg.JoinError, stagereg.StagingError) as error:
        assert_type(str(error), str)
    except stagereg.StageregError as error:
        print(error)
    except (stagereg.Preempted, stagereg.Stopped) as ended:
        assert_type(ended.received, signal.Signals)
