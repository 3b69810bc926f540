"""Restores random number generators and the position in the epoch, so that Lightning's ``fit`` resumes bit for bit.

Lightning restores neither, and draws random numbers before the first step. Each rank therefore restores its generators
after the ``on_train_start`` hooks, and creates the data iterator again. To resume within an epoch, this module sets the
generators to their state at the start of the epoch, fetches and drops the batches that the run already used, and then
sets the generators to their state at the save. So the shuffle order and the random numbers of workers stay the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.seed import isolate_rng

import stagereg
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.state.entries import PerRank, per_rank, rank_name
from stagereg.integrations.lightning_uneven import JoinedLoader

_log = logging.getLogger(__name__)

RESUME = "stagereg_resume"  # name of a per-rank entry in the checkpoint, with the state that Lightning does not save


class ResumedFit:
    """Saves and restores the state of one rank that Lightning's checkpoint does not contain."""

    def __init__(self, end_step: Callable[[], object]) -> None:
        self._end_step = end_step
        # States of the generators: "iterator" before the data iterator of this epoch was created, "batch" before its
        # first batch.
        self._began: dict[str, dict[str, torch.Tensor]] = {}
        self._loaded: dict[str, Any] | None = None

    def follow(self, fit_loop: Any) -> None:
        """Replace the methods of ``fit_loop`` that ``fit`` calls before and after it creates a data iterator."""
        self._fit_loop = fit_loop
        fit_loop._load_combined_loader_states = self._before_first_iterator
        fit_loop.epoch_loop.on_run_start = self._begin_epoch
        fit_loop.epoch_loop.update_lr_schedulers = self._update_schedulers

    def state(self, checkpoint: dict[str, Any]) -> dict[str, PerRank[Any]]:
        """Return the per-rank entry to save. It includes the data loader state in Lightning's ``checkpoint``."""
        loaders = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        return {RESUME: per_rank({"began": dict(self._began), "loaders": loaders})}

    def restore(self, chosen: str, ranks: int, load: Callable[[dict[str, Any]], None], objects: dict[str, Any]) -> None:
        """Load ``objects`` and this rank's entry from ``chosen``. :meth:`begin_training` sets the generators later."""
        with stagereg.open_checkpoint(chosen) as opened:
            as_many = opened.manifest is not None and opened.manifest.world_size == ranks
            has_own = rank_name(RESUME, 0) in opened.entries
        own = per_rank(dict[str, Any]())
        with isolate_rng():
            load({**objects, **({RESUME: own} if has_own else {})})
            self._loaded = {**own.value, "saved": _generators()} if as_many else None

    def begin_training(self) -> None:
        if self._loaded is not None:
            rng.restore(self._loaded["saved"])

    def forget(self) -> None:
        self._loaded = None

    def _update_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update the schedulers, which Lightning does after each batch, before its callbacks may save."""
        loop = self._fit_loop.epoch_loop
        type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
        if interval == "step" and not update_plateau_schedulers:
            self._end_step()

    def _before_first_iterator(self) -> None:
        type(self._fit_loop)._load_combined_loader_states(self._fit_loop)
        self._began = {"iterator": _generators()}

    def _begin_epoch(self, fetcher: Any) -> None:
        loop, loaded, before = self._fit_loop.epoch_loop, self._loaded, _generators()
        type(loop).on_run_start(loop, fetcher)
        self._loaded, done = None, loop.batch_progress.current.ready
        if loaded is not None and done:
            self._skip(fetcher, done, loaded)
            return
        if loaded is not None:
            rng.restore(before)
            iter(fetcher)
        if loaded is not None or loop.trainer.current_epoch > 0:  # the iterator of epoch 0 already exists
            self._began = {"iterator": before}
        self._began["batch"] = _generators()

    def _skip(self, fetcher: Any, done: int, loaded: dict[str, Any]) -> None:
        """Skip the first ``done`` batches of the epoch. The samplers already have the epoch's number."""
        self._began, loaders = loaded.get("began", {}), loaded.get("loaders")
        joined = [each for each in fetcher.combined_loader.flattened if isinstance(each, JoinedLoader)]
        if loaders:  # Lightning restores the position of rank 0 on every rank
            fetcher.combined_loader._load_state_dicts(loaders)
            iter(fetcher)
            fetcher.fetched += done
        elif "batch" in self._began and type(fetcher) is _PrefetchDataFetcher and done < self._fit_loop.max_batches:
            _log.info("stagereg: fetching and dropping the %d batches of this epoch that were already used", done)
            rng.restore(self._began["batch" if joined else "iterator"])
            for each in joined:
                each.skip = done
            iter(fetcher)
            rng.restore(self._began["batch"])
            for _ in range(0 if joined else done):
                next(fetcher)
        rng.restore(loaded["saved"])


def _generators() -> dict[str, torch.Tensor]:
    return rng.as_tensors(rng.capture())
