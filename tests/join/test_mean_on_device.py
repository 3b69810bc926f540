"""``join.mean`` of a loss on an accelerator: no rank waits for its device, and all ranks have the values of a host.

A double of an accelerator takes tensors on the CPU for losses on a device, and gloo for a backend in stream order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import stagereg
from stagereg.errors import PeerFailedError
from stagereg.join import context, mean_loss
from stagereg.join.responder import Responder
from stagereg.kernel.shadow import TorchWire
from stagereg.testing import run_ranks

from ..support.parallel import COLUMNS

LENGTHS = (2, 5, 3)
OVER = ("samples", "world", "active")


class NoReads(TorchDispatchMode):
    """Raises where the host reads the value of a tensor, which waits for an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def accelerator(is_used: bool = True, where: Callable[[torch.Tensor], bool] = lambda loss: True) -> Iterator[mock.Mock]:
    """Losses that are ``where`` count as losses on a device. Yields the collective that sums them, as a mock."""
    with (
        mock.patch.object(mean_loss, "stays_on_device", lambda loss: is_used and where(loss)),
        mock.patch.object(context, "stays_on_device", lambda loss: is_used and where(loss)),
        mock.patch.object(mean_loss, "sums_in_stream", return_value=True),
        mock.patch.object(mean_loss, "sum_in_stream", wraps=mean_loss.sum_in_stream) as summed,
    ):
        yield summed


def batches(rank: int, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    seed = torch.Generator().manual_seed(rank)
    return [torch.randn(3 + (i + rank) % 3, 4, generator=seed).to(dtype) for i in range(lengths[rank])]


def trained(rank: int, over: str, dtype: torch.dtype, column: Any, mode: str, iterates: bool) -> list[torch.Tensor]:
    """The values that ``join.mean`` returned on this rank, and the parameters after training."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    model = column.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    loader = batches(rank, LENGTHS, dtype)
    with stagereg.Join([model, optimizer], mode=mode, timeout=30, loader=None if iterates else loader) as join:
        for x in join.iterate(loader) if iterates else loader:
            optimizer.zero_grad()
            summed = model(x).square().sum()
            summed = summed if len(x) else summed * math.nan
            with NoReads() if iterates and mean_loss.stays_on_device(summed) else contextlib.nullcontext():
                loss = join.mean(summed, len(x), over)
                (loss / 2).backward()
            assert type(loss) is torch.Tensor
            optimizer.step()
            values.append(loss.detach())
    return [torch.stack(values), *column.params(net).values()]


def both_ways(rank: int, world_size: int, dtype: torch.dtype) -> list[tuple[bool, int, Any, Any]]:
    """Programs: whether they iterate, how many sums stayed on the device, the results with and without a device."""
    found = []
    for name, mode, iterates in (("ddp", "counted", True), ("fsdp2", "planned", True), ("ddp", "planned", False)):
        column = COLUMNS[name]()
        for over in OVER:
            with accelerator() as summed:
                mine = trained(rank, over, dtype, column, mode, iterates)
            with accelerator(is_used=False):
                found.append((iterates, summed.call_count, mine, trained(rank, over, dtype, column, mode, iterates)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_rank_reads_its_loss_and_all_have_the_values_of_a_host(dtype: torch.dtype) -> None:
    ranks = run_ranks(both_ways, len(LENGTHS), args=(dtype,), timeout_s=100)
    for program in zip(*ranks, strict=True):
        longest = max((device[0] for _, _, device, _ in program), key=len)
        for iterates, count, device, host in program:
            assert count == (max(LENGTHS) if iterates else min(LENGTHS))  # in a plain loop, until a rank has left
            if dtype == torch.float64:  # a host may add the numbers of three ranks in another order
                torch.testing.assert_close(device, host, rtol=1e-14, atol=0)
            else:
                assert all(map(torch.equal, device, host))
            assert device[0].isfinite().all()
            assert torch.equal(device[0], longest[: len(device[0])])


def without_values(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Losses on the device ``meta``, whose values do not exist."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    join = stagereg.Join([model], mode="counted", timeout=20)
    join._wire.device = torch.device("meta")
    found = []
    with (
        accelerator(where=lambda loss: loss.is_meta),
        mock.patch.object(dist, "all_gather_single", return_value=None),
        join,
    ):
        for x in join.iterate(batches(rank, (2, 3))):
            model(x).sum().backward()
            for over in OVER:
                total = torch.ones((), device="meta", requires_grad=True)
                loss = join.mean(total * 2, len(x), over)
                loss.backward()
                assert total.grad is not None
                found.append((loss.device.type, total.grad.device.type))
    return found


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch before 2.13 has another name for it")
def test_a_loss_without_a_value_has_a_mean_and_a_gradient() -> None:
    assert run_ranks(without_values, 2, timeout_s=60) == [[("meta", "meta")] * 9] * 2


def unpaired(rank: int, world_size: int, case: str) -> tuple[list[int], list[float], list[float]]:
    """Not every rank may use the collective. Sums on the device, exchanges, all means, and the sums of the loop."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    means, sums = [], []
    is_here = case == "order" or rank == 0
    with (
        accelerator(where=lambda _: is_here) as summed,
        mock.patch.object(Responder, "request", autospec=True, side_effect=Responder.request) as request,
        stagereg.Join([model], mode="counted", timeout=20) as join,
    ):
        for i, x in enumerate(join.iterate(batches(rank, (2, 4)))):
            model(x).sum().backward()
            reduced = torch.tensor([10.0 + i])
            if rank or case == "device":
                work = dist.all_reduce(reduced, async_op=True)
                means.append(join.mean(torch.tensor(3.0 * len(x)), len(x)).item())
            else:
                means.append(join.mean(torch.tensor(3.0 * len(x)), len(x)).item())
                work = dist.all_reduce(reduced, async_op=True)
            assert work is not None
            work.wait()
            sums.append(reduced.item())
    return [summed.call_count, request.call_count], means, sums


@pytest.mark.parametrize("case", ["device", "order"])
def test_ranks_that_cannot_pair_the_sum_use_the_host(case: str) -> None:
    """Rank 1 has its loss on the CPU; or rank 0 calls ``join.mean`` before a collective, and rank 1 after it.

    The first call takes a second exchange.
    """
    expected = ([0, 1 + 4], [3.0] * 4, [20.0, 22.0, 24.0, 26.0])
    assert run_ranks(unpaired, 2, args=(case,), timeout_s=60) == [expected, expected]


class Quiet(stagereg.Joinable):
    """Announces its steps itself, and has none."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> stagereg.JoinHook:
        return stagereg.JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def quiet(rank: int, world_size: int) -> list[float]:
    with accelerator() as summed, stagereg.Join([Quiet()], mode="counted", timeout=20) as join:
        means = [join.mean(x.sum(), len(x)).item() for x in join.iterate([torch.ones(2), torch.ones(3)])]
    assert summed.call_count == 2
    return means


def test_the_sum_is_not_a_collective_of_a_joinable_that_announced_no_step() -> None:
    assert run_ranks(quiet, 2, timeout_s=60) == [[1.0, 1.0]] * 2


def test_an_aborted_collective_leaves_nan() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        share, wire = torch.tensor(2.0, dtype=torch.float64), TorchWire(dist.group.WORLD, torch.device("cpu"))
        assert mean_loss.sum_in_stream(wire, share).item() == 2
        with mock.patch.object(dist, "all_gather_single", return_value=None, create=True):
            assert mean_loss.sum_in_stream(wire, share).isnan()
    finally:
        dist.destroy_process_group()


def failing(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(nn.Linear(4, 1))
    error: type[Exception] = ValueError if rank else PeerFailedError

    def train() -> None:
        with accelerator(), stagereg.Join([model], mode="counted", timeout=20) as join:
            for i, x in enumerate(join.iterate(batches(rank, (4, 4)))):
                loss = join.mean(model(x).sum(), len(x))
                if i == 1 and rank:
                    raise ValueError("no more")
                loss.backward()

    with pytest.raises(error) as caught:
        train()
    return str(caught.value)


def test_the_error_of_another_rank_is_raised() -> None:
    first, second = run_ranks(failing, 2, timeout_s=60)
    assert second == "no more"
    assert "rank 1 failed: ValueError: no more" in first


def test_one_process_computes_its_mean_on_the_device() -> None:
    join = stagereg.Join([nn.Linear(1, 1)], enable=False)
    for n, dtype in ((3, torch.float32), (0, torch.float64), (7.5, torch.bfloat16)):
        total = torch.tensor(math.pi if n else math.nan, dtype=dtype, requires_grad=True)
        host = join.mean(total, n)
        with accelerator(), NoReads():
            device = join.mean(total, n)
            grads = [torch.autograd.grad(loss, total)[0] for loss in (host, device)]
        assert torch.equal(host, device)
        assert torch.equal(*grads)
        assert host.dtype == device.dtype == dtype


def on_device(rank: int, world_size: int, kind: str, waits: bool) -> list[float]:
    """Means of a short training. A call that waits for a GPU raises, unless the backend ``waits``."""
    device = torch.device(kind, rank % max(torch.cuda.device_count(), 1))
    wire = TorchWire(dist.group.WORLD, device)
    assert mean_loss.sums_in_stream(wire) != waits
    if not waits:
        torch.cuda.set_device(device)
        share = torch.tensor(rank + 1.0, dtype=torch.float64, device=device)
        for mode in ("default", "error"):  # the first collective sets up connections
            torch.cuda.set_sync_debug_mode(mode)
            total = mean_loss.sum_in_stream(wire, share)
            torch.cuda.set_sync_debug_mode("default")
            assert total.item() == sum(range(world_size + 1))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1).to(device))
    values = []
    with stagereg.Join([model], mode="counted", timeout=30) as join:
        for i, x in enumerate(join.iterate([x.to(device) for x in batches(rank, (2, 4))])):
            for over in OVER:
                model.zero_grad()
                summed = model(x).square().sum()
                if i and not waits:
                    torch.cuda.set_sync_debug_mode("error")
                loss = join.mean(summed, len(x), over)
                loss.backward()
                if not waits and world_size == 1:  # join.mean then needs no exchange
                    assert join._session is not None
                    *_, total = mean_loss.sum_losses(join._session, summed, len(x), 1.0, join._collectives)
                if not waits:
                    torch.cuda.set_sync_debug_mode("default")
                if not waits and world_size == 1:
                    assert torch.equal(total, summed.to(torch.float64))
                values.append(loss.item())
    return values


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("nccl", 2), ("gloo", 2)])
def test_a_step_on_a_gpu_does_not_wait_for_it(backend: str, ranks: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    host = run_ranks(on_device, ranks, args=("cpu", True), timeout_s=60)
    device = run_ranks(on_device, ranks, args=("cuda", backend == "gloo"), backend=backend, timeout_s=120)
    for found, right in zip(device, host, strict=True):
        assert found == pytest.approx(right, rel=1e-5)


def captured(rank: int, world_size: int) -> str:
    total, join = torch.ones((), device="cuda"), stagereg.Join([nn.Linear(1, 1)], enable=False)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            join.mean(total, 2)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_mean_in_a_captured_graph_raises() -> None:
    """A replay would use the counts of the captured step."""
    assert "captur" in run_ranks(captured, 1, timeout_s=60)[0]


def test_a_stream_that_is_captured_has_no_sum() -> None:
    class OnGpu:
        is_cuda = True

        def numel(self) -> int:
            return 1

    with mock.patch.object(torch, "Tensor", OnGpu):
        for is_captured in (False, True):
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=is_captured):
                assert mean_loss.stays_on_device(OnGpu()) != is_captured  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_gpu_divides_as_a_host_does() -> None:
    totals = torch.randn(1000, dtype=torch.float64)
    for total, n in zip(totals.tolist(), range(1, 1001), strict=True):
        found = mean_loss.divided(torch.tensor(total, dtype=torch.float64, device="cuda"), float(n))
        assert isinstance(found, torch.Tensor)
        assert found.item() == total / n
