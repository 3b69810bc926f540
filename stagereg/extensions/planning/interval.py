"""The checkpoint interval that minimizes the time lost to failures and checkpoints.

The model is Daly's, with the extension that asynchronous checkpoints need (Vaidya). A run repeatedly works for the
interval *T*, then saves. Failures are random, *M* seconds apart on average (exponentially distributed), and also occur
during restarts. Each failure costs the restart time *R* and all work since the newest complete checkpoint. *C* is the
training time that a checkpoint costs: the blocked loop, and slower steps during copying and writing. *L*, the write
time, is the age of the state when its checkpoint is complete; the next save waits until then. T seconds of work take

    M · exp((R + L - C) / M) · (exp((T + C) / M) - 1)   seconds,

which for L = C is the time in Daly's paper of 2006. The best interval depends only on C and M. All times are seconds.

Sources: J. W. Young, CACM 17(9), 1974, doi:10.1145/361147.361115. N. H. Vaidya, IEEE Transactions on Computers 46(8),
1997, doi:10.1109/12.609281. J. T. Daly, FGCS 22(3), 2006, doi:10.1016/j.future.2004.11.016.
"""

from __future__ import annotations

import math


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, equation 37 of the paper.

    ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C`` for ``C < 2 M``, otherwise M. This is within 1 % of the
    interval that loses the least time if the cost is below 0.7 M, and always within 7 %.
    """
    part = cost_s / (2 * mtbf_s)
    if part >= 1:
        return mtbf_s
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def least(cost_s: float, write_s: float) -> float:
    """Return the shortest interval, in seconds, in which each checkpoint is complete before the next save begins."""
    return max(0.0, write_s - cost_s)


def in_steps(interval_s: float, step_s: float, least_s: float) -> int:
    """Convert ``interval_s`` to training steps of ``step_s`` seconds: at least one step and at least ``least_s``."""
    # The rounding error of the division must not add a step.
    return max(1, round(interval_s / step_s), math.ceil(least_s / step_s * (1 - 1e-12)))
