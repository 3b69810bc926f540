"""Placement: partners for any machines, in other domains, the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.extensions.tiers.placement import Machine, partners

from ...support.examples import examples

Placed = Mapping[str, Sequence[str]]

DOMAINS = st.sampled_from(["", "", "a", "b", "c", "d", "e"])
MACHINES = st.dictionaries(st.text(max_size=4), DOMAINS, min_size=1, max_size=40).map(
    lambda named: [Machine(name, domain) for name, domain in named.items()]
)
COPIES = st.integers(0, 4)


def cluster(count: int, domains: int = 0) -> list[Machine]:
    return [Machine(f"node{n}", f"rack{n % domains}" if domains else "") for n in range(count)]


def wanted(placed: Placed, copies: int) -> dict[str, set[str]]:
    return {name: set(others[:copies]) for name, others in placed.items()}


def sizes(machines: Sequence[Machine]) -> Counter[str]:
    """How many machines each domain has."""
    return Counter(each.domain or f"of {each.name}" for each in machines)


@given(MACHINES, COPIES)
def test_each_machine_has_as_many_partners_as_can_be_and_is_not_its_own(machines: list[Machine], copies: int) -> None:
    placed = partners(machines, copies)
    names = {each.name for each in machines}
    assert placed.keys() == names
    for name, others in placed.items():
        assert len(others) == len(set(others)) == (min(copies + 4, len(names) - 1) if copies else 0)
        assert set(others) <= names - {name}


@given(MACHINES.flatmap(lambda them: st.tuples(st.just(them), st.permutations(them))), COPIES)
def test_every_rank_finds_the_same_whatever_the_order(orders: tuple[list[Machine], list[Machine]], copies: int) -> None:
    assert partners(orders[0], copies) == partners(orders[1], copies)


@settings(max_examples=examples(300))
@given(MACHINES, COPIES)
def test_a_machine_and_its_partners_are_in_domains_of_their_own(machines: list[Machine], copies: int) -> None:
    groups = len(machines) // (copies + 1)
    odd_pairs = copies == 1 and groups > 0 and len(machines) % 2
    if max(sizes(machines).values()) > groups + odd_pairs:
        return
    placed, domains = partners(machines, copies), {each.name: each.domain or f"of {each.name}" for each in machines}
    for name, others in wanted(placed, copies).items():
        assert len({domains[each] for each in (name, *others)}) == copies + 1


@settings(max_examples=examples(300))
@given(MACHINES, st.integers(1, 4))
def test_machines_that_share_a_domain_with_a_partner_are_as_few_as_can_be(machines: list[Machine], copies: int) -> None:
    if len(machines) % (copies + 1):
        return
    groups, domains = len(machines) // (copies + 1), {each.name: each.domain or each for each in machines}
    crowded = Counter(
        domains[name]
        for name, others in wanted(partners(machines, copies), copies).items()
        if domains[name] in [domains[each] for each in others]
    )
    for domain, n in Counter(domains.values()).items():
        least, more = divmod(n, groups)
        assert crowded[domain] == (n if least > 1 else 2 * more if least else 0)


@settings(max_examples=examples(300))
@given(MACHINES, COPIES)
def test_machines_receive_equally_many_copies(machines: list[Machine], copies: int) -> None:
    placed = wanted(partners(machines, copies), copies)
    most = max(Counter(each for others in placed.values() for each in others).values(), default=0)
    if max(sizes(machines).values()) <= len(machines) // (copies + 1):
        assert most <= copies


@given(st.integers(1, 300), st.integers(1, 3), st.integers(0, 9))
def test_there_are_few_sets_of_partners(count: int, copies: int, racks: int) -> None:
    placed = wanted(partners(cluster(count, racks), copies), copies)
    sets = {frozenset({name, *others}) for name, others in placed.items()}
    assert len(sets) <= count // (copies + 1) + (count % (copies + 1)) * (copies + 2)


@given(MACHINES, COPIES, st.data())
def test_who_stands_in_for_a_lost_partner_is_in_another_domain_where_there_is_one(
    machines: list[Machine], copies: int, data: st.DataObject
) -> None:
    domains = {each.name: each.domain or f"of {each.name}" for each in machines}
    name = data.draw(st.sampled_from(sorted(domains)))
    standing_in = partners(machines, copies)[name][copies:]
    own = [domains[each] == domains[name] for each in standing_in]
    assert own == sorted(own)
