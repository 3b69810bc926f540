"""Trains with different numbers of batches per rank in Lightning's ``Trainer``: the callback :class:`UnevenInputs`.

All ranks run the same number of steps: that of the rank with the most batches. :meth:`stagereg.Join.iterate` yields
empty batches on a rank that has run out of data. ``training_step`` returns the mean loss of a batch. Before backward,
this loss is scaled, so that gradients are those of the mean over the samples of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch.distributed.fsdp import FSDPModule

from stagereg.errors import JoinError
from stagereg.join.context import Join


class UnevenInputs(pl.Callback):
    """Trains on all batches, even if ranks have different numbers: ``Trainer(callbacks=[UnevenInputs()])``.

    The result equals that of one process that trains on the batches of all ranks: each step uses the mean over the
    samples of all ranks. ``training_step`` must accept a batch without samples: use ``x.flatten(1)``, not
    ``x.view(len(x), -1)``. The loss of such a batch may be NaN. The callback requires ``automatic_optimization``, one
    train loader that has a length on every rank, and DDP or ``ModelParallelStrategy``. If each rank has its own data,
    pass ``use_distributed_sampler=False`` to the Trainer; otherwise Lightning repeats samples on shorter ranks.

    Args:
        samples: a function that returns the number of samples or tokens in a batch, over which the loss is a mean.
            ``None``: the size of the batch's first dimension.
        timeout: seconds after which the other ranks raise an error if one rank does not reach a step. The timeout must
            be longer than the longest step, including validation and checkpoints.

    Raises:
        JoinError: the Trainer uses an unsupported feature. Raised on all ranks before the first step.
        PeerFailedError: another rank failed during training.
    """

    def __init__(self, samples: Callable[[Any], float] | None = None, timeout: float = 1800.0) -> None:
        self._samples: Callable[[Any], float] = samples or extract_batch_size
        self._timeout = timeout
        self._join: Join | None = None
        self._batches: Iterator[Any] | None = None
        self._n = 0.0  # number of samples in the current batch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace two methods of the strategy: one to wrap the train loader, one to average the loss over ranks."""
        strategy = trainer.strategy
        if stage != "fit" or isinstance(strategy, SingleDeviceStrategy):
            return
        if not isinstance(strategy, DDPStrategy | ModelParallelStrategy):
            raise JoinError(f"UnevenInputs supports DDP and ModelParallelStrategy, got {type(strategy).__name__}.")
        if not pl_module.automatic_optimization:
            raise JoinError("UnevenInputs needs automatic_optimization: it averages the loss of training_step.")
        self._trainer = trainer
        wrapped: dict[str, Callable[..., Any]] = {"process_dataloader": self._process, "backward": self._backward}
        for name, method in wrapped.items():
            setattr(strategy, name, method)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader = trainer.train_dataloader
        if trainer.world_size > 1 and not isinstance(loader, JoinedLoader):
            raise JoinError(f"UnevenInputs supports a single train loader, got a {type(loader).__name__}.")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._n = float(self._samples(batch))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the join. Called after the same step on all ranks."""
        self._leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave(type(exception), exception, exception.__traceback__)

    def _process(self, loader: Any) -> Any:
        strategy = self._trainer.strategy
        loader = type(strategy).process_dataloader(strategy, loader)
        if not self._trainer.training:
            return loader
        try:
            length = len(loader)
        except (TypeError, NotImplementedError):
            length = -1
        lengths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lengths, length)
        if -1 in lengths:
            raise JoinError(
                f"The train loader of rank {lengths.index(-1)} has no length. Lightning then fetches each batch before "
                "the step of the previous batch, so ranks cannot wait for each other in between. Give the dataset a "
                "__len__ that is at most the number of samples on this rank."
            )
        return JoinedLoader(loader, max(lengths), self.iterate)

    def iterate(self, loader: Any, example: Any = None) -> Iterator[Any]:
        """Iterate over ``loader`` in a new join, which begins at the first batch. ``example``: any batch of it."""
        self._leave()
        strategy = self._trainer.strategy
        sharded = [module for module in self._trainer.lightning_module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.reshard()  # FSDP leaves the outermost module unsharded after validation.
        if not sharded and not isinstance(strategy, DDPStrategy):
            text = "UnevenInputs cannot detect steps: no module is sharded. Call fully_shard in configure_model."
            raise JoinError(text)
        self._join = Join([sharded[0] if sharded else strategy.model], mode="auto", timeout=self._timeout)
        self._join.__enter__()
        self._batches = self._join.iterate(loader, example)
        yield from self._batches

    def _backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> None:
        strategy = self._trainer.strategy
        if self._join is not None:
            closure_loss = self._join.mean(closure_loss * self._n, self._n)
        type(strategy).backward(strategy, closure_loss, *args, **kwargs)

    def _leave(self, *error: Any) -> None:
        join, batches = self._join, self._batches
        self._join = self._batches = None
        if join is not None:
            if batches is not None:
                batches.close()  # type: ignore[attr-defined]
            join.__exit__(*(error or (None, None, None)))


class JoinedLoader:
    """Yields ``length`` batches on each rank, empty ones after the end of ``loader``. Skips ``skip`` batches once."""

    skip = 0

    def __init__(self, loader: Any, length: int, iterate: Callable[..., Iterator[Any]]) -> None:
        self._loader, self._length, self._iterate = loader, length, iterate

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if not self.skip:
            return self._iterate(self._loader)
        left, skip, self.skip = iter(self._loader), self.skip, 0
        dropped = deque(islice(left, skip), maxlen=1)
        return self._iterate(left, dropped[0] if dropped else None)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
