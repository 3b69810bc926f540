"""The contract of a stager, as tests to inherit: what ``stagers.async_stager.AsyncStager`` promises, tried one by one.

The author of a stager writes one method, and pytest does the rest::

    class TestMine(stagereg.testing.StagerContract):
        def make(self):
            return MyStager(threads=2)

Stagers are called as torch's ``async_save`` calls them: a future is waited for; otherwise ``synchronize_staging`` is
called where ``should_synchronize_after_execute``. Every trial is bounded, so a stager that hangs fails. What a copy is
compared with is noted before anything is staged (``snapshot``), and distributed tensors are staged on a rank of its
own (``ranks``). It knows no stager of the project, and makes no claim about speed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from stagereg.errors import RegistryError, StageregError
from stagereg.kernel.memory import padding_around
from stagereg.spec import check
from stagereg.stagers.async_stager import (
    AsyncStager,
    ReleasesCopies,
    ReservesPadding,
    SharesMemory,
    StateDict,
    WatchesOptimizers,
)
from stagereg.testing.fidelity import Fidelity
from stagereg.testing.snapshot import difference, note
from stagereg.testing.stager_trial import promise, promise_on_a_rank
from stagereg.testing.state_samples import CustomValue, GatedWriter, PatientCaller

__all__ = ["StagerContract"]

_LARGE = 36 * 2**20
"""Bytes that no malloc keeps for later: glibc maps what is above 32 MiB, and unmaps it at once."""


class StagerContract(Fidelity):
    """Inherit from this, write ``make``, and each ``test_*`` tries one promise on your stager.

    What to override is described in :class:`~stagereg.testing.stager_trial.StagerTrial`: ``make``, and for stagers that
    are not like others ``expected``, ``timeout_s`` and ``device``.
    """

    # The shape

    @promise
    def test_it_has_the_shape_of_a_stager(self) -> None:
        """It has stage, synchronize_staging, close and should_synchronize_after_execute, as torch calls them."""
        stager = self.opened()
        try:
            check("stager", type(stager).__name__, stager)
        except RegistryError as error:
            self.broken(str(error))
        if not isinstance(stager.should_synchronize_after_execute, bool):
            self.broken(f"should_synchronize_after_execute is {stager.should_synchronize_after_execute!r}, not a bool")
        if isinstance(stager, SharesMemory) and not isinstance(stager.shares_memory, bool):
            self.broken(f"shares_memory is {stager.shares_memory!r}, not a bool")

    # Isolation

    @promise
    def test_later_writes_do_not_show(self) -> None:
        """Writes to the source after staging do not show in the copy, whatever the size of the tensor."""
        state: StateDict = {
            "small": self.ones(1000),
            "large": self.ones(2**20),
            "nested": [{"w": self.ones(3, 3)}, self.ones(5)],
        }
        tensors = [state["small"], state["large"], state["nested"][0]["w"], state["nested"][1]]
        noted = self.noted(state)
        copied = self.settled(self.opened(), state)
        for x in tensors:
            x.fill_(7)
        self.agree(copied, noted, "after in-place writes to the source")
        for x in tensors:
            x.untyped_storage().fill_(1)
        self.agree(copied, noted, "after writes to the source's storage")

    @promise
    def test_writes_that_no_version_counter_sees_are_staged(self) -> None:
        """Writes that do not move torch's version counter (.data, numpy, collectives) are in the next copy."""
        stager, w = self.opened(), self.ones(100)

        def by_numpy() -> None:
            w.numpy()[:] = 2

        writes: dict[str, Callable[[], object]] = {
            "tensor.data": lambda: w.data.add_(1),
            "the storage": lambda: w.untyped_storage().fill_(3),  # type: ignore[attr-defined]
            **({"numpy": by_numpy} if self.device == "cpu" else {}),
        }
        self.settled(stager, {"w": w})
        for way, write in writes.items():
            write()
            noted = self.noted({"w": w})
            self.agree(self.settled(stager, {"w": w}), noted, f"staged after a write through {way}")

    @promise
    def test_a_training_loop_is_staged_as_it_was(self) -> None:
        """The copy of a model and its optimizer is what they were, while training goes on."""
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        model.to(self.device)
        optimizer = torch.optim.AdamW(model.parameters())
        stager = self.opened()
        if isinstance(stager, WatchesOptimizers):
            stager.watch(optimizer)

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 8, device=self.device)).sum().backward()
            optimizer.step()

        for step in range(3):
            train()
            state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": step}
            noted = self.noted(state)
            copied = self.settled(stager, state)
            train()
            self.agree(copied, noted, "after one more step of training")
            del copied

    @promise
    def test_values_that_are_no_tensors_are_copied(self) -> None:
        """Lists, dicts, sets, buffers and objects in the state dict are copied, not shared with the source."""
        settings = CustomValue([1])
        state: StateDict = {"list": [1], "dict": {"k": 1}, "set": {1}, "bytes": bytearray(b"ab"), "object": settings}
        copied = self.settled(self.opened(), state)
        state["list"].append(2)
        state["dict"]["l"] = 2
        state["set"].add(2)
        state["bytes"][0] = 0
        settings.steps.append(2)
        wanted = {"list": [1], "dict": {"k": 1}, "set": {1}, "bytes": bytearray(b"ab"), "object": CustomValue([1])}
        for kind, value in wanted.items():
            if copied[kind] != value:
                self.broken(f"after a change to the source's {kind}, the copy's is {copied[kind]!r}, not {value!r}")

    @promise
    def test_the_source_is_left_as_it_is(self) -> None:
        """Staging changes nothing in the source (keys, values, places), nor torch's settings and random state."""
        w = torch.nn.Parameter(self.counted(6))
        state: StateDict = {"z": w, "a": [self.ones(3), 5], "m": {"z": 1, "a": None}}
        noted, address, values = note(state, lambda x: x), w.data_ptr(), state["a"]
        stager, settings, drawn = self.opened(), self._settings(), torch.random.get_rng_state()
        self.settled(stager, state)
        if (now := self._settings()) != settings:
            self.broken(f"staging changed torch's settings from {settings} to {now}")
        if not torch.equal(torch.random.get_rng_state(), drawn):
            self.broken(
                "staging drew from torch's random numbers, so a run that saves trains on others than one without"
            )
        problem = difference(state, noted, "the source") if self.device == "cpu" else None
        if problem:
            self.broken(f"after staging, {problem}")
        if state["z"] is not w or w.data_ptr() != address or state["a"] is not values:
            self.broken("after staging, the source's values lie elsewhere")
        if vars(w):
            self.broken(f"after staging, a tensor of the source has the attributes {sorted(vars(w))}")

    # In flight

    @promise
    def test_a_copy_that_is_held_stays_as_it_is(self) -> None:
        """A copy that is still held is not overwritten by the next one."""
        stager, source = self.opened(), {"w": self.ones(1000), "b": self.ones(7)}
        held = []
        for step in range(2):
            for x in source.values():
                x.fill_(step)
            held.append((self.noted(source), self.settled(stager, source)))
        for noted, copied in held:
            self.agree(copied, noted, "with another copy made while it was held")

    @promise
    def test_a_slice_keeps_its_copy(self) -> None:
        """Memory is not used again while a slice of a tensor of the copy is held, by whomever."""
        stager, source = self.opened(), {"w": self.ones(1000)}
        noted = self.noted({"slice": source["w"][100:200]})
        held = {"slice": self.settled(stager, source)["w"][100:200]}
        gc.collect(1)
        source["w"].fill_(2)
        later = self.settled(stager, source)
        self.agree(held, noted, "after the copy was dropped but for a slice, and another one made")
        del later

    @promise
    def test_holding_copies_never_blocks(self) -> None:
        """However many copies their caller holds, the next stage comes back with a right one."""
        stager, source, held = self.opened(), {"w": self.ones(1000)}, []
        for step in range(4):
            source["w"].fill_(step)
            noted = self.noted(source)
            held.append(self.settled(stager, source))
            self.agree(held[-1], noted, f"with {step} copies held")

    @promise
    def test_two_stagers_keep_apart(self) -> None:
        """What one stager hands out is not touched by another one, nor by its close()."""
        one, other = self.opened(), self.opened()
        source = {"w": self.ones(1000)}
        noted = self.noted(source)
        copied = self.settled(one, source)
        source["w"].fill_(2)
        self.settled(other, source)
        other.close()
        self.agree(copied, noted, "after another stager was used and closed")

    @promise
    def test_released_copies_end_and_what_is_held_of_them_stays(self) -> None:
        """If it has release(): a released copy is empty and not waited for; its tensors stay while they are held."""
        stager, source, held = self.opened(), {"x": self.ones(1000)}, []
        if not isinstance(stager, ReleasesCopies):
            return
        stager.expect_release()
        for step in range(3):
            source["x"].fill_(step)
            noted = self.noted(source)
            copied = self.settled(stager, source)
            held.append((noted, dict(copied)))
            stager.release(copied)
            if copied:
                self.broken(f"after release(), the copy still has the entries {list(copied)}")
        for noted, tensors in held:
            self.agree(tensors, noted, "after its release, with its tensors held and other copies made")

    @promise
    def test_reserved_padding_belongs_to_no_other_tensor(self) -> None:
        """If it has reserve_padding(): what is written into the padding of a tensor shows in no tensor."""
        stager, source = self.opened(), {str(n): self.counted(n) for n in (100, 7, 1000)}
        if not isinstance(stager, ReservesPadding):
            return
        stager.reserve_padding(64, 32)
        noted = self.noted(source)
        copied = self.settled(stager, source)
        for x in copied.values():
            padding = padding_around(x)
            if padding is not None:
                ctypes.memset(x.data_ptr() - padding.before, 255, padding.before)
                ctypes.memset(x.data_ptr() + x.nbytes, 255, padding.after)
        self.agree(copied, noted, "after the padding of its tensors was written")

    @promise
    def test_dropped_copies_are_given_back(self) -> None:
        """The memory of dropped copies is freed or used again: staging for ever takes no more and more of it."""
        stager, times, source = self.opened(), 6, {"w": self._large()}

        def stage_often() -> None:
            for step in range(times):
                source["w"].fill_(step)
                self.settled(stager, source)

        grown = self._grown_by(stage_often, times // 2 * _LARGE)
        if grown:
            what = f"{times} copies of {_LARGE >> 20} MiB, each dropped at once"
            self.broken(f"after {what}, the process has {grown >> 20} MiB more")

    # Change

    @promise
    def test_keys_may_change(self) -> None:
        """Keys and items may come and go between calls."""
        x, y = self.ones(3), self.counted(3)
        states: list[StateDict] = [{"a": x}, {"a": x, "b": y}, {"b": y, "a": x}, {"b": y}, {"b": [y, x]}, {"b": [y]}]
        self._one_after_another([*states, {}, {"a": {"b": y}}, {"a": x}])

    @promise
    def test_shapes_may_change(self) -> None:
        """Shapes may change between calls, and nothing is broadcast."""
        shapes = [(6,), (1,), (), (3, 2), (2, 3), (1, 6), (12,), (6,)]
        self._one_after_another([{"w": self.counted(torch.Size(shape).numel()).view(shape)} for shape in shapes])

    @promise
    def test_dtypes_may_change(self) -> None:
        """Dtypes may change between calls, and nothing is cast."""
        dtypes = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.float32]
        self._one_after_another([{"w": self.counted(6).to(dtype)} for dtype in dtypes])

    @promise
    def test_a_tensor_may_be_resized_in_place(self) -> None:
        """A tensor that was resized in place is staged in its new size."""
        stager, w = self.opened(), self.counted(4)
        for size in (4, 100, 2):
            w.resize_(size).fill_(size)
            noted = self.noted({"w": w})
            self.agree(self.settled(stager, {"w": w}), noted, f"after resize_({size})")

    @promise
    def test_a_tensor_may_move_to_other_memory(self) -> None:
        """A tensor that was given other memory (module.to, optimizer.load_state_dict) is staged from there."""
        stager, w = self.opened(), self.counted(6)
        before = w.detach()  # keeps the old memory from being given out again
        for value in (2.0, 3.0):
            self.settled(stager, {"w": w})
            w.data = torch.full_like(w, value)
            noted = self.noted({"w": w})
            self.agree(self.settled(stager, {"w": w}), noted, "after tensor.data was replaced")
        before.fill_(0)

    @promise
    def test_ties_may_change(self) -> None:
        """Tensors may begin and cease to share memory between calls."""
        stager, x, y = self.opened(), self.counted(8), self.ones(8)
        for other in (x, y, x):
            state = {"a": x, "b": other.view(other.shape)}
            noted = self.noted(state)
            copied = self.settled(stager, state)
            self.agree(copied, noted, "of tensors that are tied now, or no more")
            if other is x:
                self.tied(copied, "a", "b", 0)
            elif copied["a"].data_ptr() == copied["b"].data_ptr():
                self.broken("tensors that share memory no more still share it in the copy")

    # What cannot be staged

    @promise
    def test_what_cannot_be_staged_is_named(self) -> None:
        """A value that cannot be staged is a StageregError with its path; nothing is left out in silence."""
        bad: dict[str, Any] = {"lock": threading.Lock(), "meta": torch.empty(3, device="meta")}
        for name, value in bad.items():
            state = {"model": {"layers": [self.ones(2), {name: value}]}, "ok": self.ones(3)}
            error = self._error_of(self.opened(), state)
            what = f"{type(value).__name__} at model.layers.1.{name}"
            if error is None:
                self.broken(f"a {what}, which cannot be copied, was no error")
            if not isinstance(error, StageregError):
                self.broken(f"a {what} is {type(error).__name__}: {error}; raise StagingError(path, reason)")
            rest = str(error)
            for part in ("model", "layers", "1", name):
                _, found, rest = rest.partition(part)
                if not found:
                    self.broken(f"the error for a {what} does not name that path: {error}")

    @promise
    def test_an_error_leaves_the_stager_usable(self) -> None:
        """After an error the stager goes on, and earlier copies stay as they are."""
        stager, state = self.opened(), {"w": self.ones(1000)}
        noted = self.noted(state)
        copied = self.settled(stager, state)
        bad: StateDict = {"w": self.ones(1000) * 2, "bad": threading.Lock()}
        for _ in range(3):
            self._error_of(stager, bad)
        if self._fails_later(stager, bad):
            self._error_of(stager, state)  # who gave a future cannot know that it was looked at, and may raise it again
        try:
            later = self.settled(stager, state)
        except Exception as error:
            self.broken(f"after an error, another state dict is one too: {type(error).__name__}: {error}")
        self.agree(later, noted, "after an error")
        self.agree(copied, noted, "after an error, in an earlier copy")

    @promise_on_a_rank
    def test_a_storage_that_shrank_is_an_error(self) -> None:
        """A tensor whose storage has been freed or cut under it is an error, never a copy of something else."""
        for left in (0, 8):
            stager, w = self.opened(), self.ones(64)
            self.settled(stager, {"w": w})
            w.untyped_storage().resize_(left)
            if self._error_of(stager, {"w": w}) is None:
                self.broken(f"a tensor of 256 bytes over a storage of {left} was staged without an error")

    @promise
    def test_errors_that_nobody_looked_at_surface(self) -> None:
        """An error of background work that nobody asked for is raised by the next call, or by close()."""
        bad: StateDict = {"w": self.ones(3), "bad": threading.Lock()}
        if not self._fails_later(self.opened(), bad):
            return
        stager = self.opened()
        failed = stager.stage(bad)
        assert isinstance(failed, Future)
        wait([failed], self.timeout_s)
        del failed
        try:
            stager.stage({"w": self.ones(3)})
            stager.close()
        except Exception:
            return
        self.broken("a future that failed and was not looked at left no trace in the next stage() and in close()")

    # The end

    @promise
    def test_close_is_harmless_early_and_twice(self) -> None:
        """close() may be called twice, and before anything was staged."""
        unused, used = self.opened(), self.opened()
        self.settled(used, {"w": self.ones(3)})
        for stager, when in ((unused, "never used"), (used, "used")):
            for count in ("first", "second"):
                try:
                    stager.close()
                except Exception as error:
                    self.broken(f"the {count} close() of a stager {when} raised {type(error).__name__}: {error}")

    @promise
    def test_use_after_close_says_so(self) -> None:
        """stage() after close() is a StageregError that says that the stager is closed."""
        stager = self.opened()
        self.settled(stager, {"w": self.ones(3)})
        stager.close()
        error = self._error_of(stager, {"w": self.ones(3)})
        if error is None:
            self.broken("stage() after close() made a copy")
        if not isinstance(error, StageregError) or "close" not in str(error):
            self.broken(f"stage() after close() is {type(error).__name__}: {error}; raise StagerClosedError")

    @promise
    def test_copies_outlive_the_stager(self) -> None:
        """Copies stay as they are when their stager is closed and gone."""
        state = {"w": self.ones(2**16), "b": self.ones(10)}
        noted = self.noted(state)
        stager = self.opened()
        copied = self.settled(stager, state)
        stager.close()
        self.forget()
        del stager
        gc.collect(1)
        # Would land in memory that was freed too early.
        fresh = [torch.full((2**16,), 9.0) for _ in range(4)]
        self.agree(copied, noted, "after its stager was closed")
        del fresh

    @promise
    def test_close_ends_the_threads(self) -> None:
        """No thread of the stager is left after close()."""
        before = set(threading.enumerate())
        stager = self.opened()
        self.settled(stager, {"w": self.ones(2**18)})
        stager.close()
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(1.0)
        names = sorted(thread.name for thread in left if thread.is_alive())
        if names:
            self.broken(f"a second after close(), these threads are still there: {', '.join(names)}")

    @promise
    def test_close_gives_the_memory_back(self) -> None:
        """After close(), no memory is kept but that of copies that are still held."""
        state = {"w": self._large()}

        def stage_and_close() -> None:
            stager = self.opened()
            self.settled(stager, state)
            stager.close()

        grown = self._grown_by(stage_and_close, _LARGE // 2)
        if grown:
            self.broken(f"after a dropped copy of {_LARGE >> 20} MiB and close(), {grown >> 20} MiB are still taken")

    # torch

    @promise
    def test_torchs_async_save_writes_what_was_staged(self) -> None:
        """torch's async_save takes the stager, early and late writers write what was staged, and load reads it."""
        stager = self.opened()
        with tempfile.TemporaryDirectory(prefix="stagereg-contract-", ignore_cleanup_errors=True) as folder:
            for order in ("early", "late"):
                state: StateDict = {"w": self.counted(1000), "nested": {"t": self.counted(12).view(3, 4).t()}}
                wanted = {"w": self.expected(state["w"]).clone(), "t": self.expected(state["nested"]["t"]).clone()}
                self._save(stager, state, Path(folder, order), late=order == "late")
                got = {"w": torch.zeros_like(wanted["w"]), "nested": {"t": torch.zeros_like(wanted["t"])}}
                load(got, checkpoint_id=Path(folder, order), no_dist=True)
                for name, x in (("w", got["w"]), ("t", got["nested"]["t"])):  # type: ignore[index]
                    if not torch.equal(x, wanted[name]):  # type: ignore[arg-type]
                        self.broken(f"a checkpoint whose writer came {order} holds other values of {name}")

    # What the promises have in common

    def _large(self) -> torch.Tensor:
        """A tensor whose copy has ``_LARGE`` bytes, whatever the stager makes of its dtype."""
        return self.ones(_LARGE // self.expected(self.ones(1)).element_size())

    def _save(self, stager: AsyncStager, state: StateDict, folder: Path, late: bool) -> None:
        """Save as torch does, with a writer that writes as early, or as late, as the order of calls allows."""
        written, overwritten = threading.Event(), threading.Event()
        writer = GatedWriter(folder, overwritten if late else None, written, self.timeout_s)
        # A stager that makes the caller wait may wait for the writer, so there is nothing later than that.
        ordered: Any = stager if late else PatientCaller(stager, written, self.timeout_s)
        if stager.should_synchronize_after_execute:
            overwritten.set()
        saved: Any = async_save(state, storage_writer=writer, async_stager=ordered, no_dist=True)
        if hasattr(saved, "staging_completion"):
            saved.staging_completion.result(self.timeout_s)
        state["w"].fill_(-1)
        state["nested"]["t"].fill_(-1)
        overwritten.set()
        getattr(saved, "upload_completion", saved).result(self.timeout_s)

    def _settings(self) -> dict[str, object]:
        """What would change how the caller trains on, if it were left otherwise."""
        return {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "default dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def _one_after_another(self, states: list[StateDict]) -> None:
        stager = self.opened()
        for state in states + states[::-1]:
            noted = self.noted(state)
            self.agree(self.settled(stager, state), noted, f"after a change to the keys {list(state)}")

    def _error_of(self, stager: AsyncStager, state: StateDict) -> Exception | None:
        """What staging ``state`` raises: at once, in its future, when it is waited for, or later."""
        try:
            self.settled(stager, state)
            stager.synchronize_staging()
        except Exception as error:
            return error
        return None

    def _fails_later(self, stager: AsyncStager, state: StateDict) -> bool:
        """Whether staging ``state`` returns a future that fails."""
        try:
            staged = stager.stage(state)
        except Exception:
            return False
        return isinstance(staged, Future) and staged.exception() is not None

    def _grown_by(self, use: Callable[[], None], limit: int) -> int:
        """Bytes of memory that the process has more after ``use``, or 0 if they are within the limit.

        The whole process is measured, so what is too much is measured once more: a stager takes it again.
        """
        grown = 0
        for _ in range(2):
            self.settled(self.opened(), {"w": self.ones(10)})
            gc.collect()
            before = self._resident()
            use()
            if self._resident() - before <= limit:
                return 0
            gc.collect()
            grown = self._resident() - before
            if grown <= limit:
                return 0
        return grown

    def _resident(self) -> int:
        """Bytes of memory that this process has; the promise is left out where the system does not say."""
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            self.skipped("this system has no /proc/self/statm to read the memory of the process from")
