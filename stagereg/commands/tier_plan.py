"""What ``stagereg plan --copies`` answers: what a tier of a cluster survives and needs, and how often to save to both.

The tier is for failures that some machine's copy outlives; the store for the others: those that end the whole cluster,
and ``copies + 1`` machines of one group lost before what the first one held is copied again. The formulas are those of
:mod:`stagereg.checkpoint.save.interval` for each of the two, and :func:`.survival` for the groups of machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import stagereg.checkpoint.save.interval as interval
from stagereg.checkpoint.tiers.placement import Machine, partners, survival, survives
from stagereg.errors import ConfigError
from stagereg.output import size_text

_KEPT = 2  # steps: the newest that is copied, and the one that is being saved
_MOST_LOST = 16


@dataclass
class Cluster:
    """The machines of a job, and the copies that each has on others; times in seconds.

    Raises:
        ConfigError: there are not enough machines.
    """

    nodes: int
    copies: int
    domains: int  # 0: each machine is one of its own
    lost: int  # the most machines at once that a chance is computed for
    link_bytes_s: float  # that a machine sends to others
    ends_s: float  # from one failure that ends what all machines hold to the next, on average

    def __post_init__(self) -> None:
        for name, least in (("copies", self.copies + 1), ("domains", self.domains), ("lost", self.lost)):
            if least > self.nodes:
                raise ConfigError(f"--{name} {getattr(self, name)} needs at least {least} machines (--nodes).")
        if self.lost > _MOST_LOST:
            raise ConfigError(f"--lost must be at most {_MOST_LOST}, not {self.lost}.")
        self.machines = [Machine(f"{n}", f"{n % self.domains}" if self.domains else "") for n in range(self.nodes)]

    def domains_survived(self) -> int:
        """Return of how many domains the loss is survived, each alone."""
        placed, machines = partners(self.machines, self.copies), self.machines
        groups = [
            [each.name for each in machines[n :: self.domains or self.nodes]] for n in range(self.domains or self.nodes)
        ]
        return sum(survives(placed, self.copies, group) for group in groups)


@dataclass
class TierPlan:
    """What :func:`plan` found; times in seconds, ``steps`` where the time of one is known."""

    share_bytes: int  # of the state, a machine
    memory_bytes: int  # or disk, a machine
    survival: list[float]  # of a step, when 1, 2, … machines are lost at once
    domains_survived: int
    copied_s: float  # from the save until the copies are complete
    interval_s: float
    steps: int | None
    sent_bytes_s: float  # by a machine on average, at that interval
    lost: float  # part of the time, but for the store's saves and what only they save
    store_mtbf_s: float  # from one failure that needs the store to the next
    store_interval_s: float
    store_steps: int | None
    store_lost: float


def plan(
    cluster: Cluster, nbytes: int, cost_s: float, write_s: float, restart_s: float, mtbf_s: float, step_s: float | None
) -> TierPlan:
    """Return the plan; the costs are as of :class:`stagereg.commands.planning.Job`."""
    copies, share = cluster.copies, math.ceil(nbytes / cluster.nodes)
    chances = [
        survival(cluster.machines, copies, k) for k in range(1, max(cluster.lost, min(copies + 1, cluster.nodes)) + 1)
    ]
    copied_s = cost_s + copies * share / cluster.link_bytes_s
    exposed_s = restart_s + copied_s  # until what was lost is copied again
    more = (exposed_s / mtbf_s) ** copies / math.factorial(copies)  # that copies further machines fail meanwhile
    uncovered = (1 - chances[copies]) * min(1.0, more) / mtbf_s
    store_mtbf_s = 1 / (1 / cluster.ends_s + uncovered)

    def best(of_s: float, after_s: float) -> tuple[float, int | None]:
        best_s, least_s = interval.best(cost_s, of_s, after_s), interval.least(cost_s, after_s)
        steps = interval.in_steps(best_s, step_s, least_s) if step_s else None
        return (steps * step_s, steps) if steps and step_s else (best_s, None)

    tier_s, steps = best(mtbf_s, copied_s)
    store_s, store_steps = best(store_mtbf_s, write_s)
    return TierPlan(
        share_bytes=share,
        memory_bytes=_KEPT * (1 + copies) * share,
        survival=chances[: cluster.lost],
        domains_survived=cluster.domains_survived(),
        copied_s=copied_s,
        interval_s=tier_s,
        steps=steps,
        sent_bytes_s=copies * share / tier_s,
        lost=interval.lost_fraction(tier_s, cost_s, mtbf_s, restart_s, copied_s),
        store_mtbf_s=store_mtbf_s,
        store_interval_s=store_s,
        store_steps=store_steps,
        store_lost=interval.lost_fraction(store_s, cost_s, store_mtbf_s, 0.0, write_s),
    )


def rows(cluster: Cluster, found: TierPlan, time: Callable[[float], str]) -> list[tuple[str, str, str]]:
    """Return the plan as a table's rows; ``time`` writes seconds."""
    many = f"{cluster.nodes:,} machines"
    what = f"each part also on {cluster.copies} other{'s' * (cluster.copies != 1)}" if cluster.copies else "no copies"
    where = f"in {cluster.domains} failure domains" if cluster.domains else "each a failure domain of its own"
    chances = [
        (f"{n} lost at once", f"{_percent(chance)}", "that a step survives it")
        for n, chance in enumerate(found.survival, 1)
    ]
    domains = cluster.domains or cluster.nodes
    whole = [("a domain lost", _percent(found.domains_survived / domains), f"of {domains}: that a step survives it")]
    return [
        ("machines", many, f"{what}, {where}"),
        *chances,
        *(whole if cluster.domains else []),
        (
            "memory or disk",
            size_text(found.memory_bytes),
            f"a machine, for {_KEPT} steps of {1 + cluster.copies} parts of {size_text(found.share_bytes)}",
        ),
        ("network", f"{size_text(found.sent_bytes_s)}/s", "that a machine sends, and receives, on average"),
        ("copied", time(found.copied_s), f"after a save began, at {size_text(cluster.link_bytes_s)}/s (--link-gib-s)"),
        ("store needed", time(found.store_mtbf_s), "from one failure that no machine's copy outlives to the next"),
    ]


def _percent(chance: float) -> str:
    """A chance, which is 100 % or 0 % only if it is."""
    text = f"{chance:.2%}"
    return {"100.00%": "100%" if chance == 1 else "> 99.99%", "0.00%": "0%" if chance == 0 else "< 0.01%"}.get(
        text, text
    )
