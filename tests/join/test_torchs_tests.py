"""torch's own tests of joins over DDP, which its wheel has, pass with torch's ``Join`` and with this one in its place.

They are written for two GPUs. Here what they put on a GPU stays on the CPU, and gloo is the backend. Two things are
adapted: images are cut to 40 pixels a side, since convolutions of 1,000 take minutes; and ``BatchNorm1d`` is not turned
into ``SyncBatchNorm``, which torch has for accelerators only.
"""

from __future__ import annotations

import inspect
import sys
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms import join as torch_join
from torch.overrides import TorchFunctionMode

import stagereg
from stagereg.testing import run_ranks

NAMES = (
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
)
ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": "2"}
"""What torch's tests read when they are imported."""
PIXELS = 40


class OnCpu(TorchFunctionMode):
    """Leaves on the CPU what is asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        return function(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))


def run_test(rank: int, world_size: int, name: str, join: Any) -> list[str]:
    """Run one of torch's tests with a class in the place of torch's ``Join``; return the names of all such tests."""
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    import torch.testing._internal.distributed.distributed_test as theirs
    from torch.nn.parallel import distributed
    from torch.testing._internal.common_utils import TestCase

    class Case(theirs.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
        pass

    names = [each for each in dir(Case) if each.startswith("test_ddp_") and ("join" in each or "uneven" in each)]
    if name not in names:
        return names
    construct, inputs = distributed.DistributedDataParallel.__init__, theirs.DDPUnevenTestInput

    def on_cpu(self: Any, module: Any, device_ids: Any = None, **kwargs: Any) -> None:
        construct(self, module, **kwargs)

    def smaller(inp: Any, **kwargs: Any) -> Any:
        return inputs(inp=inp[..., :PIXELS, :PIXELS] if "conv" in kwargs["name"] else inp, **kwargs)

    case = Case(name)
    case.rank = rank
    with (
        OnCpu(),
        mock.patch.object(distributed, "Join", mock.Mock(wraps=join)) as used,
        mock.patch.object(distributed.DistributedDataParallel, "__init__", on_cpu),
        mock.patch.object(theirs, "DDPUnevenTestInput", smaller),
        mock.patch.object(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", lambda module: module),
        mock.patch.multiple("torch.cuda", set_device=mock.Mock(), synchronize=mock.Mock(), current_device=lambda: 0),
    ):
        inspect.unwrap(getattr(Case, name))(case)
    assert used.called
    return names


@pytest.mark.slow
@pytest.mark.parametrize("join", [torch_join.Join, stagereg.Join], ids=["torch", "ours"])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_test_passes(name: str, join: Any) -> None:
    names, _ = run_ranks(run_test, args=(name, join), env=ENVIRONMENT, timeout_s=240)
    assert set(names) <= set(NAMES)
    if name not in names:
        pytest.skip(f"torch {torch.__version__} does not have it yet")
