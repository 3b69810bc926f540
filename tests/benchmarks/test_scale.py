"""What a save of a large model sends and costs rank 0 as ranks grow in number: a small part of ``make scale``."""

from __future__ import annotations

import pytest

from stagereg.bench.measure import in_own_process

from . import scale


@pytest.mark.slow
def test_in_a_warm_save_ranks_send_a_few_hundred_bytes_and_the_first_of_a_stage_its_new_learning_rate() -> None:
    few, many = (in_own_process(scale.simulate, "pipeline, 8 stages", ranks)["warm"] for ranks in (8, 32))
    assert few["sent"] <= many["sent"] < 15_000, "the structure that holds the learning rate"
    assert many["received"] - few["received"] < 1000 * (32 - 8)


@pytest.mark.slow
def test_in_a_first_save_a_rank_sends_what_it_has_however_many_there_are() -> None:
    few, many = (in_own_process(scale.simulate, "pipeline, 8 stages", ranks)["first"] for ranks in (8, 32))
    assert many["sent"] < 1.1 * few["sent"]
