"""The contract of a stager (see ``stagers.async_stager.AsyncStager``): a class of tests to inherit.

The tests call a stager as torch's ``async_save`` does. If ``stage`` returns a future, they wait for its result;
otherwise they call ``synchronize_staging`` if ``should_synchronize_after_execute`` is True. Each test has a time limit.
"""

from __future__ import annotations

import gc
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_leaves, tree_map

from stagereg.base.spec import check
from stagereg.errors import RegistryError, StageregError, StagingError
from stagereg.stagers.async_stager import AsyncStager, ReleasesCopies, StateDict, WatchesOptimizers
from stagereg.stagers.guard import written_by
from stagereg.testing.stager_fidelity import StagerFidelity
from stagereg.testing.stager_trial import difference, on_a_rank

_LARGE = 36 * 2**20  # bytes; glibc returns blocks above 32 MiB to the system as soon as they are freed
_Training: TypeAlias = tuple[torch.nn.Sequential, torch.optim.Optimizer, Callable[[], None]]
_HELD = 12  # copies that a test keeps alive, more than any stager has buffers for


@dataclass
class CustomValue:
    """A value of a state dict that is neither a tensor nor a container."""

    steps: list[int]


class StagerContract(StagerFidelity):
    """Inherit this class and implement ``make``. Each method ``test_*`` then tests one promise of your stager.

    :class:`~stagereg.testing.stager_trial.StagerTrial` describes the members to override: ``make``, and for unusual
    stagers ``expected``, ``timeout_s`` and ``device``.
    """

    # Interface and isolation

    def test_it_has_the_shape_of_a_stager(self) -> None:
        """The stager has every method and attribute that torch's async_save uses."""
        stager = self.opened()
        try:
            check("stager", type(stager).__name__, stager)
        except RegistryError as error:
            self.broken(str(error))
        if not isinstance(found := stager.should_synchronize_after_execute, bool):
            self.broken(f"should_synchronize_after_execute must be a bool, got {found!r}")

    def test_later_writes_do_not_show(self) -> None:
        """Writes to source tensors after staging do not change the copy, regardless of tensor size."""
        stager, state = self.opened(), self.sized()
        with self.kept(stager, state, "after in-place writes to the source"):
            self.fill(state, 1)
        with self.kept(stager, state, "after writes to the source's storage"):
            for x in tree_leaves(state):
                x.untyped_storage().fill_(1)

    def test_writes_that_no_version_counter_sees_are_staged(self) -> None:
        """The next copy contains writes that do not update torch's version counter (.data, numpy, collectives)."""
        stager, w = self.opened(), self.ones(100)
        storage: Any = w.untyped_storage()
        writes: dict[str, Callable[[], object]] = {
            "tensor.data": lambda: w.data.add_(1),
            "the storage": lambda: storage.fill_(3),
            **({"numpy": lambda: w.numpy().fill(2)} if self.device == "cpu" else {}),
        }
        self.settled(stager, {"w": w})
        for way, write in writes.items():
            write()
            self.faithful(stager, {"w": w}, f"staged after a write through {way}")

    def test_a_training_loop_is_staged_as_it_was(self) -> None:
        """The copy of a model and its optimizer keeps the values from the time of staging while training continues."""
        stager = self.opened()
        model, optimizer, train = self._training(stager)
        for step in range(3):
            train()
            state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": step}
            with self.kept(stager, state, "after one more step of training"):
                train()

    def test_a_future_does_not_hold_up_training(self) -> None:
        """A staging future never contains values of later training steps, unless should_synchronize_after_execute."""
        stager = self.opened()
        model, optimizer, train = self._training(stager, 2**18)
        train()
        ways: list[Callable[[], object]] = [optimizer.step, *[lambda: _write(optimizer)] * 2]
        for way in ways:  # Some writes are repeated, because the outcome depends on timing.
            train()
            state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
            noted, staged = self.noted(state), stager.stage(state)
            if not isinstance(staged, Future) or stager.should_synchronize_after_execute:
                return
            way()  # Do not wait for the future first: a Checkpointer does not wait either.
            try:
                copied = staged.result()
            except StagingError:  # allowed, except for the writes of a watched optimizer
                if way == optimizer.step:
                    raise
                continue
            if wrong := difference(copied, noted, self.expected):
                advice = "Copy before stage() returns, or let should_synchronize_after_execute be True"
                self.broken(f"after a write before the future was done, {wrong}. {advice}")

    def _training(self, stager: AsyncStager, width: int = 2**16) -> _Training:
        """Return a model with small and large layers, its optimizer, and a function for one training step."""
        layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, width)
        model = torch.nn.Sequential(*layers).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters())
        if isinstance(stager, WatchesOptimizers):
            stager.watch(optimizer)

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 8, dtype=torch.get_default_dtype(), device=self.device)).sum().backward()
            optimizer.step()

        return model, optimizer, train

    def test_values_that_are_no_tensors_are_copied(self) -> None:
        """Lists, dicts, sets, bytearrays and objects in the state dict are copied, not shared with the source."""
        settings, value = SimpleNamespace(steps=[1]), CustomValue([1])
        state: StateDict = {"list": [1], "dict": {"k": 1}, "set": {1}, "bytes": bytearray(b"ab")}
        state |= {"object": settings, "dataclass": value}
        with self.kept(self.opened(), state, "after changes to the source's values"):
            state["list"].append(2)
            state["dict"]["l"] = 2
            state["set"].add(2)
            state["bytes"][0] = 0
            settings.steps.append(2)
            value.steps.append(2)

    def test_the_source_is_left_as_it_is(self) -> None:
        """Staging changes neither the source (keys, values, memory) nor torch's grad mode and random state."""
        w = torch.nn.Parameter(self.counted(6))
        state: StateDict = {"z": w, "a": [self.ones(3), 5], "m": {"z": 1, "a": None}}
        noted, address, values = self.noted(state), w.data_ptr(), state["a"]
        stager, grad, drawn = self.opened(), torch.is_grad_enabled(), torch.random.get_rng_state()
        self.settled(stager, state)
        if torch.is_grad_enabled() != grad:
            self.broken(f"staging changed torch.is_grad_enabled() from {grad} to {not grad}")
        if not torch.equal(torch.random.get_rng_state(), drawn):
            self.broken(
                "staging drew random numbers from torch, so a run that saves trains differently from one that does not"
            )
        if self.device == "cpu" and (problem := difference(state, noted, where="source")):
            self.broken(f"after staging, {problem}")
        if state["z"] is not w or w.data_ptr() != address or state["a"] is not values:
            self.broken("after staging, the source's values are in other memory")
        if vars(w):
            self.broken(f"after staging, a tensor of the source has the attributes {sorted(vars(w))}")

    # Copies in flight

    def test_held_copies_stay_as_they_are(self) -> None:
        """stage() does not overwrite or wait for earlier copies that are still referenced, or slices of copies."""
        stager, source, held = self.opened(), self.sized(), []
        for step in range(_HELD):
            held.append(self.settled(stager, self.fill(source, step)))
        for step, copied in enumerate(held):
            self._unchanged(copied, self.sized(step), f"copy {step + 1} of {_HELD} held copies")
        held.clear()
        parts = [_halves(self.settled(stager, self.fill(source, step))) for step in range(3)]
        gc.collect(1)
        later = [self.settled(stager, self.fill(source, step)) for step in range(3, 6)]
        for step, part in enumerate(parts):
            wanted = _halves(self._all_expected(self.sized(step)))  # expected() accepts only whole tensors
            if wrong := difference(part, wanted, lambda tensor, path: tensor):
                self._has_changed("a copy of which only slices were held", wrong)
        del later

    def test_copies_outlive_stagers(self) -> None:
        """A returned copy does not change if another stager stages, or if its own stager is closed."""
        source = self.sized()
        copied = self.settled(self.opened(), source)
        self.settled(self.opened(), self.fill(source, 1))
        self.close()
        gc.collect(1)
        fresh = [self.sized(2) for _ in range(4)]  # These tensors would overwrite memory that was freed too early.
        self.agree(copied, self.sized(), "after another stager was used, and both were closed")
        del fresh

    def test_released_copies_end_and_what_is_held_of_them_stays(self) -> None:
        """release(), if defined, empties a copy, does not block later calls, and does not change tensors in use."""
        stager, source, held = self.opened(), self.sized(), []
        if not isinstance(stager, ReleasesCopies):
            return
        stager.expect_release()
        for step in range(_HELD):
            copied = self.settled(stager, self.fill(source, step))
            held.append(tree_map(lambda x: x, copied))
            stager.release(copied)
            if copied:
                self.broken(f"after release(), the copy still has {len(copied)} entries; release() must empty the dict")
        for step, tensors in enumerate(held):
            what = f"copy {step + 1} of {_HELD} released copies, whose tensors were held,"
            self._unchanged(tensors, self.sized(step), what)

    def test_memory_is_given_back(self) -> None:
        """The stager frees or reuses the memory of copies without references, and frees all of it after close()."""
        itemsize = self.expected(self.ones(1), "w").element_size()  # The stager may change the dtype.
        stager, source = self.opened(), {"w": self.ones(_LARGE // itemsize)}

        def stage_often() -> None:
            for step in range(6):
                source["w"].fill_(step)
                self.settled(stager, source)

        def stage_and_close() -> None:
            stager = self.opened()
            self.settled(stager, source)
            stager.close()

        self.grows_at_most(3 * _LARGE, stage_often, f"6 copies of {_LARGE >> 20} MiB, each dropped immediately")
        self.grows_at_most(_LARGE // 2, stage_and_close, f"a dropped copy of {_LARGE >> 20} MiB and close()")

    # Changes between calls

    def test_keys_shapes_and_dtypes_may_change(self) -> None:
        """Keys, items, shapes and dtypes may change between calls. The stager does not cast or broadcast values."""
        x, y = self.ones(3), self.counted(3)
        keys: list[StateDict] = [{"a": x}, {"a": x, "b": y}, {"b": y, "a": x}, {"b": y}, {"b": [y, x]}, {"b": [y]}]
        keys += [{}, {"a": {"b": y}}, {"a": x}]
        shapes = [(6,), (1,), (), (3, 2), (2, 3), (1, 6), (12,), (6,)]
        sized = [{"w": self.counted(torch.Size(shape).numel()).view(shape)} for shape in shapes]
        dtypes = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.float32]
        m = self.counted(9).view(3, 3)
        views: list[StateDict] = [{"w": w} for w in (m, m.view(torch.int32), m[:1], m[1:2])]
        for states in (keys, sized, views, [{"w": self.counted(6).to(dtype)} for dtype in dtypes]):
            stager = self.opened()
            for state in states + states[::-1]:
                self.faithful(stager, state, "staged after another state dict")

    def test_a_tensor_may_get_other_memory(self) -> None:
        """If a tensor was resized or moved to new memory (module.to, load_state_dict), its new content is staged."""
        stager, w = self.opened(), self.counted(4)
        for size in (4, 100, 2):
            w.resize_(size).fill_(size)
            self.faithful(stager, {"w": w}, f"after resize_({size})")
        w = self.counted(6)
        before = w.detach()  # keeps the old memory, so that the new tensor cannot get the same address
        for value in (2.0, 3.0):
            self.settled(stager, {"w": w})
            w.data = torch.full_like(w, value)
            self.faithful(stager, {"w": w}, "after tensor.data was replaced")
        before.fill_(0)

    # Values that cannot be staged

    def test_what_cannot_be_staged_is_named(self) -> None:
        """If a value cannot be staged, the stager raises a StageregError that contains the path of the value."""
        bad: dict[str, Any] = {"lock": threading.Lock(), "meta": torch.empty(3, dtype=torch.float32, device="meta")}
        for name, value in bad.items():
            state = {"model": {"layers": [self.ones(2), {name: value}]}, "ok": self.ones(3)}
            error = self._error_of(self.opened(), state)
            what = f"a {type(value).__name__} at model.layers.1.{name}"
            if not isinstance(error, StageregError):
                self.broken(f"{what} raised {_shown(error)}. Raise StagingError(path, reason)")
            if not re.search(f"model.*layers.*1.*{name}", str(error)):
                self.broken(f"the error for {what} does not name that path: {error}")

    def test_an_error_leaves_the_stager_usable(self) -> None:
        """After an error, the stager can still stage, and earlier copies are unchanged."""
        stager, state = self.opened(), self.sized()
        bad: StateDict = {**self.sized(1), "bad": threading.Lock()}
        with self.kept(stager, state, "after an error, in an earlier copy"):
            for _ in range(3):
                self._error_of(stager, bad)
            self.faithful(stager, state, "after an error")

    @on_a_rank
    def test_a_storage_that_shrank_is_an_error(self) -> None:
        """The stager raises an error if the storage of a tensor was freed or shrunk, and never copies other bytes."""
        for left in (0, 8):
            stager, w = self.opened(), self.ones(64)
            self.settled(stager, {"w": w})
            w.untyped_storage().resize_(left)
            if self._error_of(stager, {"w": w}) is None:
                self.broken(f"a tensor of 256 bytes over a storage of {left} was staged without an error")

    def test_errors_that_nobody_looked_at_surface(self) -> None:
        """If nothing reads the future of failed background work, the next stage() or close() raises its error."""
        stager = self.opened()
        model, optimizer, train = self._training(stager)
        train()
        try:
            staged = stager.stage({"w": self.ones(3), "bad": threading.Lock()})
        except Exception:  # The stager detected the error immediately. Provoke one that it can only detect later.
            train()
            staged = stager.stage(dict(model.state_dict()))
            _write(optimizer)
        if not isinstance(staged, Future):
            return
        wait([staged], self.timeout_s)
        try:
            stager.stage({"w": self.ones(3)})
            stager.close()
        except Exception:
            return
        if staged.exception() is not None:
            self.broken("the error of a future that was not read was raised neither by the next stage() nor by close()")

    # Closing, and torch

    def test_close_is_the_end(self) -> None:
        """close() works before stage() and a second time, and stops all threads. stage() after close() raises."""
        before = set(threading.enumerate())
        unused, used = self.opened(), self.opened()
        self.settled(used, {"w": self.ones(2**18)})
        for stager, when in ((unused, "never used"), (unused, "closed"), (used, "used"), (used, "closed")):
            try:
                stager.close()
            except Exception as error:
                self.broken(f"close() of a stager that was {when} raised {_shown(error)}")
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(1.0)
        if names := sorted(thread.name for thread in left if thread.is_alive()):
            self.broken(f"one second after close(), these threads still run: {', '.join(names)}")
        refusal = self._error_of(used, {"w": self.ones(3)})
        if not isinstance(refusal, StageregError) or "close" not in str(refusal):
            self.broken(f"stage() after close() raised {_shown(refusal)}. Raise StagerClosedError")

    def test_torchs_async_save_writes_what_was_staged(self) -> None:
        """torch's async_save writes the staged values, even if its writer starts after the source was overwritten."""
        stager, w, x = self.opened(), self.counted(1000), self.counted(12)
        state: StateDict = {"w": w, "nested": {"x": x}}
        wanted = {"w": self.expected(w, "w").cpu().clone(), "nested": {"x": self.expected(x, "nested.x").cpu().clone()}}
        got = tree_map(torch.zeros_like, wanted)
        noted, staged = self.noted(state), stager.stage(state)
        if isinstance(staged, Future):
            staged.result()
        else:
            self.agree(staged, noted, "after stage() returned and torch's writer may read")
        overwritten, limit_s = threading.Event(), self.timeout_s
        if stager.should_synchronize_after_execute:  # The stager may wait for the writer, so do not delay the writer.
            stager.synchronize_staging()
            overwritten.set()

        class Late(FileSystemWriter):
            def write_data(self, *args: Any, **kwargs: Any) -> Any:
                overwritten.wait(limit_s)
                return super().write_data(*args, **kwargs)

        with tempfile.TemporaryDirectory(prefix="stagereg-contract-", ignore_cleanup_errors=True) as folder:
            saved: Any = async_save(state, storage_writer=Late(folder), async_stager=stager, no_dist=True)
            if hasattr(saved, "staging_completion"):
                saved.staging_completion.result(limit_s)
            for tensor in (w, x):
                tensor.fill_(-1)
            overwritten.set()
            getattr(saved, "upload_completion", saved).result(limit_s)
            load(got, checkpoint_id=folder, no_dist=True)
        if problem := difference(got, wanted, where="saved"):
            self.broken(f"in a checkpoint with a late writer, {problem}")

    # Helpers

    def _unchanged(self, copied: Any, noted: Any, what: str) -> None:
        if wrong := difference(copied, noted, self.expected):
            self._has_changed(what, wrong)

    def _has_changed(self, what: str, wrong: str) -> None:
        self.broken(f"{what} has changed: {wrong}. The stager may reuse memory only after all tensors in it are gone.")

    def _all_expected(self, value: Any, *path: object) -> Any:
        if isinstance(value, torch.Tensor):
            return self.expected(value, ".".join(map(str, path)))
        if isinstance(value, list):
            return [self._all_expected(item, *path, at) for at, item in enumerate(value)]
        return {key: self._all_expected(item, *path, key) for key, item in value.items()}

    def _error_of(self, stager: AsyncStager, state: StateDict) -> Exception | None:
        """Stage ``state``. Return the error of ``stage``, of its future or of ``synchronize_staging``, or ``None``."""
        try:
            self.settled(stager, state)
            stager.synchronize_staging()
        except Exception as error:
            return error
        return None


def _write(optimizer: torch.optim.Optimizer) -> None:
    """Write to an optimizer's tensors, the last one first, because a stager probably copies it last."""
    with torch.no_grad():
        for x in sorted(written_by(optimizer), key=torch.Tensor.data_ptr, reverse=True):
            x.add_(1)


def _halves(state: StateDict) -> Any:
    return tree_map(lambda x: x.view(-1)[x.numel() // 2 :], state)


def _shown(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}" if error else "no error"
