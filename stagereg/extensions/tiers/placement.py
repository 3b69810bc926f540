"""Selects the machines that receive the peer copies of each machine.

The machines are sorted by failure domain and assigned round-robin to groups of ``copies + 1`` machines. The machines of
a group copy to each other. Because there are few sets of partners, few combinations of failed machines lose a step
(copysets: Cidon et al., USENIX ATC 2013). Neighbours in the sorted order are in different groups, so each group spans
as many domains as possible. If the number of machines is not a multiple of the group size, the first groups are larger.
The largest domain is sorted first, because machines in a larger group can choose between partners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

_STAND_INS = 4  # maximum number of substitutes for the failed partners of one machine


class Machine(NamedTuple):
    """One machine of a run: its name and its failure domain. Without a domain, the machine is its own domain."""

    name: str
    domain: str = ""


def partners(machines: Iterable[Machine], copies: int) -> dict[str, list[str]]:
    """Return the partners of each machine, by machine name. The order of ``machines`` does not affect the result.

    The first ``copies`` partners receive copies (fewer in a small run). Up to 4 substitutes for failed partners follow,
    the preferred ones first. If no domain has more than ``len(machines) // (copies + 1)`` machines, each machine and
    its partners are in ``copies + 1`` domains, and no machine receives more than ``copies`` copies.
    """
    domains = {each.name: (each.domain, "" if each.domain else each.name) for each in machines}
    sizes = Counter(domains.values())
    order = sorted(domains, key=lambda name: (-sizes[domains[name]], domains[name], name))
    if not copies:
        return {name: [] for name in order}

    def apart(names: list[str], *others: Collection[tuple[str, str]]) -> list[str]:
        """Sort the machines ``names`` so that machines in the domains ``others`` are last."""
        return sorted(names, key=lambda each: [domains[each] in some for some in others])

    count = max(1, len(order) // (copies + 1))
    found = {}
    for at, name in enumerate(order):
        group, turn, own = order[at % count :: count], at // count, {domains[name]}
        chosen = apart(group[turn + 1 :] + group[:turn], own)[:copies]
        spare = [each for each in order[at + 1 :] + order[:at] if each not in chosen]
        found[name] = [*chosen, *apart(spare, own, {domains[each] for each in chosen})[:_STAND_INS]]
    return found
