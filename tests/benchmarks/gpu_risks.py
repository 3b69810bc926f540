"""One small check for each of twelve risks of copies from a GPU: ``python tests/benchmarks/gpu_risks.py R4``.

Reading the code suggested each risk; ``RISKS`` in ``gpu.py`` has their names. A check runs in a process of its own and
prints one line: ``R4 ok: figures``, ``R4 fault: figures`` or ``R4 could not run: reason``. The exit code is 1 for a
fault, otherwise 0. Any exception in a check is a fault. Without a GPU (``--device cpu``) only the checks in ``ON_CPU``
run.

The checks are bounded by the process that starts them. Their limits are ratios or times that differ from a fault by a
large factor, because a check runs only a few times.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import inspect
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Verdict = tuple[bool, str]  # whether there is no fault, figures

ON_CPU = ("R2", "R5")
PORT = "STAGEREG_RISK_PORT"  # environment variable of the second process of R6
HUNG_S = 2.5  # seconds in which a call must return while the device does not advance
_MIB = 2**20

DEVICE = "cuda"


class CannotRun(Exception):
    """This machine, or this version of torch, lacks something that the check needs."""


# -- the device; tests replace these functions by doubles


def settle() -> None:
    """Wait until the device is idle."""
    import torch

    if DEVICE != "cpu":
        torch.cuda.synchronize()


def busy(seconds: float) -> None:
    """Keep the current stream busy for about ``seconds``, like a collective whose peer does not answer."""
    import torch

    torch.cuda._sleep(int(seconds * _cycles_per_s()))


@functools.cache
def _cycles_per_s() -> float:
    import torch

    torch.cuda._sleep(10**6)
    settle()
    began = time.perf_counter()
    torch.cuda._sleep(2 * 10**8)
    settle()
    return 2e8 / (time.perf_counter() - began)


def mark() -> Any:
    """Return an event that the current stream records now."""
    import torch

    return torch.cuda.current_stream().record_event()


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    """Capture ``run`` in a CUDA graph, after three runs on a side stream. Return the function that replays it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Capture the body in a CUDA graph, in torch's default mode ("global"), without waiting for the device first."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def reserved() -> int:
    """Return the bytes of device memory that torch's allocator has reserved."""
    import torch

    return torch.cuda.memory_reserved()


def pinned(nbytes: int) -> Any:
    """Return page-locked host memory as a uint8 tensor."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE != "cpu")


def size(nbytes: float) -> int:
    """Return ``nbytes`` on a GPU, and a small fraction of it on a CPU."""
    return int(nbytes if DEVICE != "cpu" else max(2**16, nbytes / 2**8))


# -- parts of checks


def within(seconds: float, call: Callable[[], T]) -> tuple[T, float]:
    """Run ``call`` on another thread. Return its result and the seconds. Raises ``TimeoutError``, and its errors."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    began = time.perf_counter()
    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds), time.perf_counter() - began


def stager(name: str, **options: Any) -> Any:
    import stagereg

    return stagereg.build("stager", name, **options)


def complete(copy: Any) -> Any:
    return copy.result(10) if isinstance(copy, Future) else copy


def model_of(nbytes: float, on_cpu: float = 2**21, **options: Any) -> tuple[Any, Any]:
    """Return square linear layers with AdamW. The state has about ``nbytes`` bytes, or ``on_cpu`` without a GPU."""
    import torch

    nbytes = nbytes if DEVICE != "cpu" else on_cpu
    width = 4096 if nbytes >= 2**29 else 1024 if nbytes >= 2**24 else 128
    layers = max(1, round(nbytes / (12 * width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device=DEVICE) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def train(model: Any, optimizer: Any) -> None:
    """Queue one training step."""
    import torch

    width = next(model.parameters()).shape[-1]
    model(torch.randn(64, width, device=DEVICE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def host_copy(state: Any) -> list[Any]:
    from stagereg.bench.states import tensors

    return [x.detach().cpu().clone() for x in tensors(state)]


def same(copy: Any, expected: Sequence[Any]) -> bool:
    import torch

    from stagereg.bench.states import tensors

    return all(torch.equal(x.cpu(), y) for x, y in zip(tensors(copy), expected, strict=True))


def same_or_error(promise: Any, expected: Sequence[Any]) -> tuple[bool, str]:
    """Return whether a copy has the expected values or its future an error of stagereg, and which."""
    from stagereg.errors import StagingError

    try:
        right = same(complete(promise), expected)
    except StagingError as error:
        return True, f"an error ({str(error)[:80]})"
    return right, "equal" if right else "DIFFERENT VALUES WITHOUT AN ERROR"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# -- the checks


def r1() -> Verdict:
    import torch

    from stagereg.bench.states import tensors
    from stagereg.checkpoint.state.optimizer_state import ParameterNames
    from stagereg.extensions.recovery.step_snapshot import StepSnapshot

    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    state, snapshot = {"model": model, "optimizer": optimizer}, StepSnapshot(ParameterNames())

    def step() -> None:
        model(torch.randn(64, 512, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in (1, 2, 3):
        step()
        snapshot.note(number, state)
    expected = host_copy(model.state_dict())
    settle()
    busy(8.0)
    begun = mark()
    step()
    try:
        why, held_s = within(HUNG_S, snapshot.hold)
        taken, taken_s = (None, 0.0) if why else within(HUNG_S, lambda: snapshot.take(0, 1))
        _, compared_s = (None, 0.0) if why else within(HUNG_S, snapshot.expect_unchanged)
    except TimeoutError:
        return False, f"hold(), take() or expect_unchanged() waits {HUNG_S:g} s for a device that does not advance"
    if begun.query():
        raise CannotRun("the device finished the simulated collective too early")
    if not why:
        found = [x for x in tensors(taken) if x.is_cpu]
        if not all(any(x.shape == y.shape and torch.equal(x, y) for x in found) for y in expected):
            return False, "the copy of step 3 is not in host memory, or has WRONG VALUES"
    return not why, f"step 3 is {why or 'whole'!r}; hold {ms(held_s)}, copy {ms(taken_s)}, compare {ms(compared_s)}"


def r2() -> Verdict:
    import torch

    states = {str(i): torch.ones(size(2**28) // 4, device=DEVICE) for i in range(4)}
    staging, addresses = stager("pinned_cached", max_in_flight=1), []

    def stage() -> float:
        settle()
        began = time.perf_counter()
        copy = staging.stage(states)
        taken = time.perf_counter() - began
        addresses[:] = [x.data_ptr() for x in copy.values()]
        return taken

    warm = statistics.median([stage() for _ in range(4)][1:])
    until = time.monotonic() + 10
    while len(staging._copier.pool._in_use) and time.monotonic() < until:
        time.sleep(0.001)  # a thread that has copied may still hold the copy, and children get copies in use
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end, or dies
        os._exit(0)
    try:
        inherited = [address for address in addresses if _is_readable(child, address)]
        after = stage()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    again = stage()
    ok = not inherited and (DEVICE == "cpu" or after <= 2 * warm + 1e-3)
    text = f"the child has {len(inherited)} of {len(addresses)} blocks; "
    return ok, text + f"a copy takes {ms(warm)}, the next after the fork {ms(after)}, then {ms(again)}"


def _is_readable(process: int, address: int) -> bool:
    """Return whether a process has readable memory at an address."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split()[1].startswith("r")
    return False


def r3() -> Verdict:
    from stagereg.bench.states import tensors

    model, optimizer = model_of(3 * 2**30)
    staging = stager("overlapped")
    for _ in range(3):
        train(model, optimizer)
    state = state_of(model, optimizer)
    expected = host_copy(state)
    calls: list[float] = []

    def save() -> Any:
        settle()
        began = time.perf_counter()
        promise = staging.stage(state)
        calls.append(time.perf_counter() - began)
        return complete(promise)

    first = save()
    staging.expect_stage()  # the saver announces the second save while the first one is written
    time.sleep(2.0)
    second = save()
    locked = all(x.is_pinned() for copy in (first, second) for x in tensors(copy))
    del first, second
    save()
    right = same(save(), expected)
    gigabytes = sum(x.nbytes for x in expected) / 1e9
    extra = (calls[1] - calls[3]) / gigabytes
    text = f"{gigabytes:.1f} GB: calls " + ", ".join(map(ms, calls))
    text += f"; the second costs {ms(extra)} per GB; {'page-locked' if locked else 'NOT PAGE-LOCKED'}"
    return right and locked and extra <= 0.03, text + ("" if right else "; WRONG VALUES")


def r4() -> Verdict:
    import torch

    can_pace = "device_piece_mib" in inspect.signature(type(stager("overlapped"))).parameters
    model = torch.nn.Linear(size(2**31) // 2**16, 2**14, bias=False, device=DEVICE)  # 2 GiB in one tensor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.ones(1024, dtype=torch.uint8, device=DEVICE)
    to, stream = pinned(other.nbytes), contextlib.nullcontext() if DEVICE == "cpu" else _side_stream()

    def small() -> float:
        began = time.perf_counter()
        with stream:
            to.copy_(other, non_blocking=True)
            mark().synchronize()
        return time.perf_counter() - began

    def longest_wait(**options: int) -> float:
        """Return the longest time of a copy of 1 KiB to the host, while ``overlapped`` copies 2 GiB to the host.

        Returns the smaller time of two such copies, because other work of the host may delay one of them.
        """
        staging = stager("overlapped", **options)
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        model.weight.grad = None
        complete(staging.stage({"w": model.weight}))  # page-locks the memory
        expected = host_copy(model.weight)
        longest = []
        for _ in range(2):
            settle()
            promise = staging.stage({"w": model.weight})
            waits, until = [small()], time.perf_counter() + 1.0
            while not promise.done() and time.perf_counter() < until:
                waits.append(small())
            longest.append(max(waits))
            if not same(complete(promise), expected):
                raise AssertionError("WRONG VALUES")
            del promise
        staging.close()
        return min(longest)

    sys.setswitchinterval(1e-4)  # seconds; otherwise the copying thread delays this thread by 5 ms at a time
    alone = max([small() for _ in range(100)][10:])
    allowed = 2 * _seconds_of_copy(64 * _MIB) + alone + 3e-3
    whole = longest_wait()
    paced = longest_wait(device_piece_mib=64) if can_pace else None
    text = f"a copy of 1 KiB takes {ms(alone)} alone, {ms(whole)} at most beside a copy"
    text += (
        f", {ms(paced)} beside a copy in pieces of 64 MiB" if paced is not None else "; there is no option for pacing"
    )
    return (whole if paced is None else paced) <= allowed, f"{text}; {ms(allowed)} allowed"


def _side_stream() -> Any:
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def _seconds_of_copy(nbytes: int) -> float:
    """Return the seconds that one copy of ``nbytes`` bytes takes, from a copy of 256 MiB to page-locked memory."""
    import torch

    source = torch.ones(size(2**28), dtype=torch.uint8, device=DEVICE)
    return _seconds_to(pinned(source.nbytes), source) / source.nbytes * nbytes


def _seconds_to(to: Any, source: Any) -> float:
    """Return the median seconds of three copies of ``source`` to host memory, after one that is not counted."""
    taken = []
    for _ in range(4):
        settle()
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        settle()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def r5() -> Verdict:
    import torch

    found = []
    for what in ("replaced", "freed", "resized"):
        model, optimizer = model_of(2**28, on_cpu=2**25)
        staging = stager("overlapped")
        for _ in range(3):
            train(model, optimizer)
        complete(staging.stage(state_of(model, optimizer)))
        train(model, optimizer)
        moments = [each["exp_avg"] for each in optimizer.state.values()]
        state = {"state": optimizer.state_dict()["state"]}
        expected, nbytes = host_copy(state), [x.untyped_storage().nbytes() for x in moments]
        if DEVICE != "cpu":
            busy(0.3)
        promise = staging.stage(state)
        for x in moments:
            if what == "replaced":
                x.data = torch.full_like(x, 7.0)
            elif what == "freed":
                x.data = torch.empty(0, device=DEVICE)
            else:
                x.untyped_storage().resize_(0)
        junk = [torch.full_like(x, 9.0) for x in model.parameters()]
        right, text = same_or_error(promise, expected)
        if what == "replaced" and [x.untyped_storage().nbytes() for x in moments] != nbytes:
            right, text = False, "A STORAGE OF THE PROGRAM CHANGED ITS SIZE"
        found.append((right, f"{what}: {text}"))
        del junk
        with contextlib.suppress(Exception):  # the error that the check has seen
            staging.close()
    return all(right for right, _ in found), "; ".join(text for _, text in found)


def r6() -> Verdict:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import stagereg
    from stagereg.join.mean_loss import sum_losses

    port, rank, limit = os.environ.get(PORT, ""), 1, datetime.timedelta(seconds=12)
    alone = DEVICE != "cpu" and torch.cuda.device_count() < 2  # NCCL needs a GPU per rank
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, rank = str(free.getsockname()[1]), 0
        command = [sys.executable, "-P", __file__, "R6", "--device", DEVICE]
        if not alone:
            subprocess.Popen(command, env={**os.environ, PORT: port}, stdout=subprocess.DEVNULL)
    if DEVICE != "cpu":
        torch.cuda.set_device(rank)
    size = 1 if alone else 2
    store = dist.TCPStore("127.0.0.1", int(port), size, rank == 0, timeout=limit)
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    model = DistributedDataParallel(torch.nn.Linear(64, 1, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    calls, queued_s = [], 0.2
    with stagereg.Join([model]) as join:
        for x in join.iterate([torch.ones(8, 64, device=DEVICE)] * 8):
            settle()
            total = model(x).square().sum()
            if DEVICE != "cpu":
                busy(queued_s)
            began = time.perf_counter()
            if alone and join._session is not None:  # join.mean of one rank exchanges nothing
                sum_losses(join._session, total, len(x), 1.0, join._collectives)
            loss = join.mean(total, len(x))
            calls.append(time.perf_counter() - began)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            settle()
    expected = total.detach().item() / len(x)
    right = abs(float(loss.detach()) - expected) <= 1e-4 * abs(expected)  # the same data on both ranks
    dist.destroy_process_group()
    call = statistics.median(calls[2:])
    text = f"join.mean returns after {ms(call)} while the device has work for {ms(queued_s)}"
    return right and call <= queued_s / 2, text + ("" if right else "; WRONG VALUE")


def r7() -> Verdict:
    import torch

    nodes = {}
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        if cpus := _cpus((node / "cpulist").read_text()) & os.sched_getaffinity(0):
            nodes[node.name] = cpus
    if len(nodes) < 2:
        raise CannotRun(f"the process may use {len(nodes)} NUMA node, and the check needs two")
    if DEVICE == "cpu":
        raise CannotRun("needs a GPU")
    from stagereg.base.pages import Block

    source, before = torch.ones(2**30, dtype=torch.uint8, device=DEVICE), os.sched_getaffinity(0)

    def rate() -> float:
        """Return bytes per second to memory that this process allocates now."""
        block = Block(2**30, True, 2)
        return float(source.nbytes / _seconds_to(torch.frombuffer(block.view(), dtype=torch.uint8), source))

    rates = {}
    for node, cpus in nodes.items():
        os.sched_setaffinity(0, cpus)
        rates[node] = rate()
    os.sched_setaffinity(0, before)
    best, spread = max(rates.values()), max(rates.values()) / min(rates.values())
    text = ", ".join(f"{node} {each / 1e9:.1f} GB/s" for node, each in rates.items())
    if spread <= 1.3:
        return True, text
    try:
        from stagereg.extensions.numa.launching import bind, find_cpus
    except ImportError:
        return False, text + "; there is no option to bind a rank"
    device, node, cpus = find_cpus(0)  # as numa=auto does in a rank
    bind(cpus)
    bound = rate()
    return bound >= 0.9 * best, text + f"; {bound / 1e9:.1f} GB/s with numa=auto (node {node} of {device})"


def _cpus(text: str) -> set[int]:
    found = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def r8() -> Verdict:
    import torch

    model, optimizer = model_of(2**30)
    for _ in range(3):
        train(model, optimizer)
    x, failures, wrong, begun = torch.ones(512, 512, device=DEVICE), [], 0, time.perf_counter()
    captures = 0
    for fresh in (True, False, True, False):  # a new stager page-locks its memory
        if fresh:
            staging = stager("overlapped")
            for _ in range(2):
                train(model, optimizer)
        state = state_of(model, optimizer)
        expected = host_copy(state)
        settle()
        promise = staging.stage(state)
        try:
            with capturing():
                for _ in range(20):
                    x + 1.0
                    time.sleep(0.002)
            captures += 1
        except RuntimeError as error:
            failures.append(f"capture: {str(error).splitlines()[0][:90]}")
        try:
            wrong += not same(complete(promise), expected)
        except Exception as error:
            failures.append(f"copy: {str(error).splitlines()[0][:90]}")
        del promise
        if failures or time.perf_counter() - begun > 10:
            break
    text = f"{captures} captures while a copy ran, {len(failures)} failed, {wrong} wrong copies"
    return not failures and not wrong, "; ".join([text, *failures])


def r9() -> Verdict:
    import torch

    found = []
    for watched in (False, True):
        model, optimizer = model_of(2**30, capturable=True, foreach=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        staging = stager("overlapped") if watched else None
        if staging:
            staging.watch(optimizer)
        replay = graph_of(optimizer.step)
        staging = staging or stager("overlapped")
        replay()
        settle()
        state = state_of(model, optimizer)
        expected = host_copy(state)
        busy(0.5)
        promise = staging.stage(state)
        replay()
        replay()
        right, text = same_or_error(promise, expected)
        found.append((right, f"{'watched before' if watched else 'captured before'}: {text}"))
        with contextlib.suppress(Exception):  # the error that the check has seen
            staging.close()
    hooks = hasattr(getattr(torch.cuda, "graphs", None), "register_graph_replay_start_hook")
    text = "; ".join(text for _, text in found) + f"; torch has replay hooks: {'yes' if hooks else 'no'}"
    return all(right for right, _ in found), text


def r10() -> Verdict:
    import torch

    count = 20_000 if DEVICE != "cpu" else 500
    sources = [torch.full((512,), float(i % 100), device=DEVICE) for i in range(count)]
    state, staging = {str(i): x for i, x in enumerate(sources)}, stager("pinned_cached")
    to = list(pinned(2048 * count).view(torch.float32).split(512))

    def once(run: Callable[[], Any]) -> float:
        settle()
        began = time.perf_counter()
        copy = run()
        settle()
        taken = time.perf_counter() - began
        del copy
        return taken

    ours, floor = [], []
    for _ in range(5):
        ours.append(once(lambda: staging.stage(state)))
        floor.append(once(lambda: torch._foreach_copy_(to, sources, non_blocking=True)))
    right = same(staging.stage(state), host_copy(state))
    mine, theirs = statistics.median(ours[2:]), statistics.median(floor[2:])
    text = f"{count} tensors of 2 KiB: {ms(mine)}, {mine / count * 1e6:.1f} µs each; one _foreach_copy_ takes "
    text += f"{ms(theirs)}; ratio {mine / theirs:.2f}, 2 allowed"
    return right and mine <= 2 * theirs, text + ("" if right else "; WRONG VALUES")


def r11() -> Verdict:
    model, optimizer = model_of(2**30)
    found = []
    for name in ("pinned_cached", "overlapped"):
        staging = stager(name)
        for _ in range(3):
            train(model, optimizer)
            complete(staging.stage(state_of(model, optimizer)))
        settle()
        if DEVICE != "cpu":
            busy(1.0)
        state = state_of(model, optimizer)
        began, used = time.perf_counter(), time.process_time()
        complete(staging.stage(state))
        taken, used = time.perf_counter() - began, time.process_time() - used
        found.append((used / taken, f"{name}: {used:.3f} s of a core in a wait of {taken:.3f} s"))
        staging.close()
    return max(share for share, _ in found) <= 0.2, "; ".join(text for _, text in found) + "; 20 % allowed"


def r12() -> Verdict:
    import torch

    from stagereg.errors import StagingError

    rows = max(64, size(2**30) // 4 // 8192)
    big = torch.arange(rows * 8192, dtype=torch.float32, device=DEVICE).view(rows, 8192)
    state, staging = {str(i): big[:, i * 64 : (i + 1) * 64] for i in range(0, 128, 2)}, stager("pinned_cached")
    expected, nbytes = host_copy(state), sum(x.nbytes for x in state.values())
    before, right = reserved(), True
    for _ in range(2):
        right &= same(staging.stage(state), expected)
    rise = (reserved() - before) / nbytes
    freed = torch.ones(1000, device=DEVICE)
    freed.untyped_storage().resize_(0)
    if DEVICE != "cpu":
        busy(0.3)
    refused = False
    try:
        staging.stage({"big": big, "freed": freed})
    except StagingError:
        refused = True
    after = staging.stage({"big": big + 1.0})
    settle()
    reused = same(after, [(big + 1.0).cpu()])
    text = f"device memory for {nbytes / 1e6:.0f} MB of views with holes: {rise * 100:+.1f} %, 5 % allowed; "
    text += f"after a failed copy the next copy is {'right' if reused else 'WRONG'}"
    text += ("" if right else "; WRONG VALUES") + ("" if refused else "; A FREED TENSOR WAS COPIED")
    return right and reused and refused and rise <= 0.05, text


CHECKS = {f"R{number}": globals()[f"r{number}"] for number in range(1, 13)}


def verdict_line(name: str, check: Callable[[], Verdict], device: str) -> str:
    """Run a check. Return its line."""
    try:
        if device == "cpu" and name not in ON_CPU and PORT not in os.environ:
            raise CannotRun("needs a GPU")
        ok, text = check()
    except CannotRun as reason:
        return f"{name} could not run: {reason}"
    except BaseException as error:
        traceback.print_exc()
        return f"{name} fault: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{name} {'ok' if ok else 'fault'}: {text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one check and print its line."""
    global DEVICE
    parser = argparse.ArgumentParser(description="The check of one risk of copies from a GPU.")
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    asked = parser.parse_args(arguments)
    DEVICE = asked.device
    line = verdict_line(asked.name, CHECKS[asked.name], asked.device)
    print(line, flush=True)
    return int(line.startswith(f"{asked.name} fault"))


if __name__ == "__main__":
    # Threads of a check may wait for a device that does not advance, so the process does not wait for them.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
