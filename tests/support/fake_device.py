"""A double of an accelerator: its memory is host memory, and what is queued on its streams is copied at once.

The stagers take every tensor in host memory for one on the device. The double records the order of events, waits and
allocations on streams. Events are complete at once, or when the test completes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import pytest
import torch

import stagereg.base.device_copy as device_copy
from stagereg.kernel.layout import plan_layout
from stagereg.kernel.transfer import Batch


class FakeEvent:
    """The end of what was queued on a stream."""

    def __init__(self, device: FakeDevice, of: str, number: int) -> None:
        self.of, self.number = of, number
        self._device = device

    def query(self) -> bool:
        self._device.queried.set()
        return self._device.done.is_set()

    def synchronize(self) -> None:
        raise AssertionError("on CUDA, this wait would use a whole core")


class FakeStream:
    """A stream of the device."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.name = name
        self._device = device

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device, self.name, len(self._device.log))
        self._device.log.append((self.name, "records", event.number))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._device.log.append((self.name, "waits for", event.of, event.number))

    def __enter__(self) -> None:
        self._device.log.append((self.name, "is entered by", threading.current_thread().name.split("_")[0]))
        self._device.current().append(self)

    def __exit__(self, *raised: object) -> None:
        self._device.current().pop()


class FakeDevice:
    """The device.

    Attributes:
        log: what happened on its streams, in order.
        done: set if the device has done all that is queued.
        queried: set if a thread asked whether something is done.
        allocated: the name of the current stream and the bytes of each buffer that the stagers allocated.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[object, ...]] = []
        self.allocated: list[tuple[str, int]] = []
        self.done = threading.Event()
        self.done.set()
        self.queried = threading.Event()
        self.capturing = False
        self._main, self._local = FakeStream(self, "main"), threading.local()
        empty = device_copy._empty

        def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
            self.allocated.append((self.current()[-1].name, nbytes))
            return empty(nbytes, device)

        patch.setattr("stagereg.kernel.copier.plan_layout", self._plan)
        patch.setattr("torch.Stream", lambda device=None: FakeStream(self, "side"))
        patch.setattr("torch.accelerator.current_stream", lambda device=None: self.current()[-1])
        patch.setattr("torch.accelerator.device_index", lambda index: contextlib.nullcontext())
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(device_copy, "_empty", allocate)

    def current(self) -> list[FakeStream]:
        """Return the current streams of this thread, the innermost last."""
        found: list[FakeStream] = self._local.__dict__.setdefault("streams", [self._main])
        return found

    def waits(self) -> list[tuple[object, ...]]:
        return [each for each in self.log if each[1] == "waits for"]

    def _plan(self, *args: Any) -> Any:
        layout = plan_layout(*args)
        return dataclasses.replace(
            layout, regions=[], batch=Batch([]), remote=layout.regions, packed=[], remote_packed=layout.packed
        )
