"""Goodput: measure how long a run spends in each phase of a start."""
