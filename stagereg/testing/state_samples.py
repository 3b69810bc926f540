"""What the contract of a stager stages and saves with: values of every dtype, an object, and a writer that can wait."""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from stagereg.stagers.async_stager import AsyncStager, StateDict

__all__ = ["DTYPES", "CustomValue", "GatedWriter", "Pair", "PatientCaller", "odd_values"]

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
"""The dtypes that checkpoints are made of."""

Pair = namedtuple("Pair", "left right")


@dataclass
class CustomValue:
    """A value of a state dict that is neither tensor nor container."""

    steps: list[int]


def odd_values(dtype: torch.dtype) -> Tensor:
    """Eight values of a dtype, two of bool: with zeros of both signs, and NaN where it has more than eight bits."""
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.tensor([0.0, -0.0, 1.5, -3.0, float("nan"), 0.1, 100.0, -7.0])
        return values.to(dtype) if dtype.itemsize > 1 else values.nan_to_num().to(dtype)
    return torch.arange(2 if dtype is torch.bool else 8 * dtype.itemsize, dtype=torch.uint8).view(dtype)


class GatedWriter(FileSystemWriter):
    """torch's writer, which waits for a gate and sets an event when it has written.

    Args:
        path: of the checkpoint.
        gate: what it waits for; ``None`` to write at once.
        written: set when everything has been read from the copy.
        timeout_s: seconds to wait at most.
    """

    def __init__(self, path: Path, gate: threading.Event | None, written: threading.Event, timeout_s: float) -> None:
        super().__init__(path)
        self._gate = gate
        self._written = written
        self._limit_s = timeout_s

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if self._gate is not None:
            self._gate.wait(self._limit_s)
        done = super().write_data(*args, **kwargs)
        self._written.set()
        return done


class PatientCaller:
    """A stager as torch sees it whose caller is slow: the writer has read the copy before staging is synchronized."""

    def __init__(self, stager: AsyncStager, written: threading.Event, timeout_s: float) -> None:
        self._stager = stager
        self._written = written
        self._limit_s = timeout_s
        self.should_synchronize_after_execute = stager.should_synchronize_after_execute

    def stage(self, state_dict: StateDict) -> Any:
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        self._written.wait(self._limit_s)
        self._stager.synchronize_staging()

    def close(self) -> None:
        self._stager.close()
