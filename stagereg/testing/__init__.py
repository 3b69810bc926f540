"""What plugin authors, and the project's own tests, test with: importing it imports no torch.

``run_ranks`` runs a function on several local ranks with a bounded wait; ``RankFailure`` says which rank failed, died
or hung, and where.
"""

from __future__ import annotations

from stagereg.testing.ranks import RankFailure, run_ranks

__all__ = ["RankFailure", "run_ranks"]
