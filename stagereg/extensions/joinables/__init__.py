"""Additional joinables: FSDP2 modules, ``ZeroRedundancyOptimizer``, and metrics over all ranks.

Without this subpackage, a join accepts only DDP modules, optimizers, schedulers and functions.
"""
