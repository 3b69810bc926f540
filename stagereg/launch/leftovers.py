"""What a job leaves in its process, for one that is to run there again: what is set back, and what refuses it.

A fresh process has its own random numbers, environment and settings of torch; these are set back to what they were when
the job began. What would disturb the next one and cannot be undone from here is looked for and named: a process group
or a device mesh that something still holds, threads, processes and work in the background that have not ended, an
accelerator that fails, files of the program that have changed meanwhile. What a program keeps in globals of its own is
not seen.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.resources
import multiprocessing
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import stagereg.kernel.channel as channel
import stagereg.shutdown as shutdown
from stagereg.launch.warm import is_installed

_END_S = 1.0
"""Seconds that threads have to end after the job."""
_COLLECTIONS, _LOOK_S = 3, 0.05
"""Of garbage, until groups are gone: what a finalizer or an ending thread has touched goes with the next one."""
_LEVELS, _SEEN = 16, 10_000
"""Of referrers, up to a name of the program; and how many objects are looked at."""
_PLAIN = (dict, list, tuple)
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (os.getcwd, os.chdir),
    (random.getstate, random.setstate),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
]


class Baseline:
    """This process before a job, with the folders of its config."""

    def __init__(self, hydra: Any) -> None:
        gc.collect()
        gc.freeze()  # so that to look for garbage of the job alone takes no time
        self._threads = {*threading.enumerate()}
        self._variables = dict(os.environ)
        self._settings = [(put, get()) for get, put in [*_SETTINGS, *_of_numpy()]]
        paths = {*_program_files(), *_config_files(hydra)}
        self._files = {path: os.stat(path).st_mtime_ns for path in paths if os.path.exists(path)}

    def set_back(self, variables: dict[str, str]) -> None:
        """Have the next job find what this one has, with some variables more."""
        for put, value in self._settings:
            put(value)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(torch.initial_seed())
        os.environ.clear()
        os.environ.update(self._variables | variables)
        channel.forget_names()

    def find_left(self, groups: Iterable[weakref.ref[Any]], own: Iterable[threading.Thread]) -> str:
        """Return what a job has left that the next one must not meet, as a clause; or nothing.

        Args:
            groups: the process groups that it had, which are destroyed.
            own: threads that are known to end.
        """
        shutdown.forget()  # errors, which hold what they were raised in
        groups = [*groups]
        for _ in range(_COLLECTIONS):
            gc.collect()
            if not any(each() is not None for each in groups):
                break
            time.sleep(_LOOK_S)
        if running := self._find_thread({*own}):  # what it has in its variables has no other name
            return running
        for mesh in _meshes():  # which also hold process groups
            return f"{_holder(mesh)} holds a device mesh of the run before"
        for group in filter(None, (each() for each in groups)):
            return f"{_holder(group)} holds a process group of the run before"
        return (
            next((f"its process {each.name} still runs" for each in multiprocessing.active_children()), "")
            or ("" if shutdown.forget() else "work in the background, such as a save, has not ended")
            or _find_fault()
            or next((f"{path} has changed" for path, at in self._files.items() if _written(path) != at), "")
        )

    def _find_thread(self, own: set[threading.Thread]) -> str:
        ends = time.monotonic() + _END_S
        for thread in {*threading.enumerate()} - self._threads - own:
            if not isinstance(thread, threading._DummyThread) and not _is_of_compiler(thread):
                thread.join(max(0.0, ends - time.monotonic()))
                if thread.is_alive():
                    return f"its thread {thread.name} still runs"
        return ""


def _program_files() -> Iterator[str]:
    for name, module in [*sys.modules.items()]:
        if not is_installed(name) and (file := getattr(module, "__file__", None)):
            yield file


def _config_files(hydra: Any) -> Iterator[str]:
    """Those in the folders from which the config was composed."""
    groups = {"", *(key.partition("@")[0] for key in hydra.runtime.choices)}
    for source in hydra.runtime.config_sources:
        with contextlib.suppress(ImportError, TypeError):  # of a package that is none
            folder = importlib.resources.files(source.path) if source.schema == "pkg" else Path(source.path)
            if source.schema in ("pkg", "file") and isinstance(folder, Path):
                yield from (str(path) for group in groups for path in (folder / group).glob("*.y*ml"))


def _written(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime_ns
    return None


def _of_numpy() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [(numpy.random.get_state, numpy.random.set_state)]


def _meshes() -> Iterator[Any]:
    if (module := sys.modules.get("torch.distributed.device_mesh")) is not None:
        yield from (each for each in gc.get_objects() if type(each) is module.DeviceMesh)


def _is_of_compiler(thread: threading.Thread) -> bool:
    """Whether it serves ``torch.compile``, whose processes are there for good and know no run."""
    target: Any = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("torch._inductor")


def _find_fault() -> str:
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return f"its accelerator fails: {str(error).strip().splitlines()[0]}"
    return ""


def _holder(value: Any) -> str:
    """Return the name by which the program can reach an object, and what is there; else what refers to it."""
    gc.unfreeze()  # else what was there before is no referrer
    spaces = {id(vars(module)): name for name, module in [*sys.modules.items()] if hasattr(module, "__dict__")}
    level, seen, first = [value], {id(value)}, ""
    for _ in range(_LEVELS):
        referrers = [each for each in gc.get_referrers(*level) if id(each) not in seen and each is not level]
        for each in referrers:
            if (name := spaces.get(id(each))) is not None:
                key, bound = next((key, bound) for key, bound in each.items() if _is_among(bound, level))
                return f"{_name_of(name)}.{key} ({type(bound).__name__})"
        seen |= {*map(id, referrers)}
        first = first or next((type(each).__name__ for each in referrers if not isinstance(each, _PLAIN)), "")
        if not referrers or len(seen) > _SEEN:
            break
        level = referrers
    return f"an object of type {first}" if first else "something"


def _is_among(value: Any, values: list[Any]) -> bool:
    return any(value is each for each in values)


def _name_of(module: str) -> str:
    """A module as its author calls it."""
    file = getattr(sys.modules[module], "__file__", None)
    return Path(file).stem if module in ("__main__", "__mp_main__") and file else module
