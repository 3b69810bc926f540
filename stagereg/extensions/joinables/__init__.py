"""Joinables of more kinds: FSDP2 modules, ``ZeroRedundancyOptimizer``, and metrics that count over all ranks.

Without this folder a join takes DDP modules, optimizers, schedulers and functions, and refuses the others by name.
"""
