"""A bound on host memory: what does not fit is read where it is, and staging is over when it has been read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
import stagereg.kernel.memory as memory
from stagereg.errors import StagingError
from stagereg.testing import run_ranks

MIB_IN_GB = 2**20 / 2**30


@pytest.fixture(params=["blocking", "pinned_cached"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builds a stager with a bound, whose reader promises to release its copies."""

    def build(mib: float, **kwargs: Any) -> Any:
        stager = stagereg.build("stager", request.param, host_memory_gb=mib * MIB_IN_GB, **kwargs)
        stager.expect_release()
        return stager

    return build


def state_of(mib: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """So many tensors of 1 MiB, two of them tied, and some small things; and what the tensors are now."""
    state: dict[str, Any] = {str(i): torch.randn(2**18) for i in range(mib)}
    state |= {"tied": state["0"].view(2, -1), "half": torch.randn(10).bfloat16(), "step": 3}
    return state, {name: x.clone() for name, x in state.items() if isinstance(x, torch.Tensor)}


def assert_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def outside(copy: dict[str, Any], source: dict[str, Any]) -> set[str]:
    return {name for name, x in source.items() if isinstance(x, torch.Tensor) and copy[name].data_ptr() == x.data_ptr()}


def test_all_copies_together_keep_to_the_bound(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = memory.Pool.take
    monkeypatch.setattr(memory.Pool, "take", lambda pool, nbytes: taken.append(nbytes) or take(pool, nbytes))
    source, expected = state_of(10)
    for mib, lent in ((8, 7), (64, 0)):  # of the first, three of 1 MiB and the small ones fit into 4 MiB
        taken.clear()
        stager = make(mib, max_in_flight=2)
        copy = stager.stage(source)
        assert len(outside(copy, source) - {"tied"}) == lent
        assert sum(taken) <= mib * 2**20 / 2
        assert copy["step"] == 3
        assert_equal(copy, expected)
        del copy
        stager.synchronize_staging()
        stager.close()
    with pytest.raises(StagingError, match="host_memory_gb must be more than 0"):
        make(0)


def bytes_copied(mib: float) -> int:
    """Of 8 MiB, with such a bound."""
    stager = stagereg.build("stager", "pinned_cached", host_memory_gb=mib * MIB_IN_GB, max_in_flight=2)
    stager.expect_release()
    source: dict[str, Any] = {str(i): torch.ones(2**18) for i in range(8)}
    copy = stager.stage(source)
    copied = sum(source[name].nbytes for name in source.keys() - outside(copy, source))
    del copy
    stager.synchronize_staging()
    stager.close()
    return copied


def copied_on_a_rank(rank: int, world_size: int, says_how_many: bool) -> int:
    if not says_how_many:
        del os.environ["LOCAL_WORLD_SIZE"]
    return bytes_copied(16)


@pytest.mark.parametrize("says_how_many", [True, False], ids=["launched", "unknown"])
def test_ranks_together_copy_no_more_than_the_bound(says_how_many: bool) -> None:
    # Two copies of each of two ranks may be in flight, so 4 MiB each.
    assert run_ranks(copied_on_a_rank, 2, args=(says_how_many,)) == [4 * 2**20] * 2


@settings(max_examples=30, deadline=None)
@given(
    mib=st.floats(0.01, 20),
    sizes=st.lists(st.integers(0, 400_000), max_size=8),
    tie=st.booleans(),
    released=st.booleans(),
)
def test_whatever_the_bound_the_copy_reads_as_the_source(
    mib: float, sizes: list[int], tie: bool, released: bool
) -> None:
    stager = stagereg.build("stager", "pinned_cached", host_memory_gb=mib * MIB_IN_GB)
    if released:
        stager.expect_release()
    source: dict[str, Any] = {str(i): torch.randn(n) for i, n in enumerate(sizes)}
    if tie and sizes:
        source["t"] = source["0"][: sizes[0] // 2]
    copy = stager.stage(source)
    for name, x in source.items():
        assert torch.equal(copy[name], x)
        assert copy[name].stride() == x.stride()
        if name not in ("0", "t"):
            assert copy[name].untyped_storage().nbytes() == x.nbytes
    if tie and sizes and sizes[0] > 1:
        assert copy["t"].untyped_storage().data_ptr() == copy["0"].untyped_storage().data_ptr()
    del copy
    stager.synchronize_staging()
    stager.close()


@pytest.mark.parametrize("releases", [True, False], ids=["releases", "drops"])
def test_staging_ends_when_the_writer_has_read_what_did_not_fit(make: Callable[..., Any], releases: bool) -> None:
    stager = make(2)
    assert stager.should_synchronize_after_execute
    source, expected = state_of(6)
    staged = [stager.stage(source)]
    waiting, written = threading.Event(), {}
    dropped = stager._copier._dropped

    class Asked:
        """A queue that starts the writer when it is waited for."""

        def get(self, timeout: float) -> int:
            waiting.set()
            return int(dropped.get(timeout=timeout))

    def write() -> None:
        copy = staged.pop()
        assert waiting.wait(30)
        for name in list(copy):
            written[name] = copy[name].clone() if isinstance(copy[name], torch.Tensor) else copy[name]
            if not releases:
                del copy[name]
        if releases:
            stager.release(copy)

    writer = threading.Thread(target=write)
    writer.start()
    stager._copier._dropped = Asked()
    stager.synchronize_staging()
    for x in source.values():
        if isinstance(x, torch.Tensor):
            x.fill_(-1)
    writer.join(30)
    assert_equal(written, expected)
    stager.close()


@pytest.mark.parametrize("releases", [True, False], ids=["releases", "keeps"])
def test_tensors_that_are_kept_are_an_error_after_wait_s(make: Callable[..., Any], releases: bool) -> None:
    stager = make(2, wait_s=0.1)
    copy = stager.stage(state_of(6)[0])
    held = max(copy.values(), key=lambda x: x.nbytes if isinstance(x, torch.Tensor) else 0)[:5]
    if releases:
        stager.release(copy)
    with pytest.raises(StagingError, match="did not fit into host_memory_gb"):
        stager.synchronize_staging()
    del held, copy
    stager.synchronize_staging()
    stager.close()


def test_a_reader_without_release_gets_memory_beyond_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    stager = stagereg.build("stager", "pinned_cached", host_memory_gb=2 * MIB_IN_GB)
    source, expected = state_of(6)
    for _ in range(2):
        copy = stager.stage(source)
        stager.synchronize_staging()  # does not wait
        assert not outside(copy, source)
    for name in expected:
        source[name].fill_(-1)
    assert_equal(copy, expected)
    assert sum("do not fit into host_memory_gb" in r.getMessage() for r in caplog.records) == 1
    stager.close()
