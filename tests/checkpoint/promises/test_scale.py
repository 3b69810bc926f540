"""What a save of a large model sends and costs rank 0 as ranks grow in number: a small part of ``make scale``."""

from __future__ import annotations

import pytest

from stagereg.bench.measure import in_own_process

from ...benchmarks import scale


@pytest.mark.slow
def test_warm_saves_send_a_few_hundred_bytes_a_rank() -> None:
    few, many = (in_own_process(scale.simulate, "pipeline, 8 stages", ranks) for ranks in (8, 32))
    assert few["warm"]["sent"] <= many["warm"]["sent"] < 1000
    assert many["warm"]["received"] < 1000 * 32
    assert many["first"]["sent"] < 1.1 * few["first"]["sent"], "a rank sends what it has, however many there are"
