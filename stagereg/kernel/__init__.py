"""The kernel: what several plugins use to copy a state dict, and to join ranks that have no data left.

Of a copy ``copier`` has all done, of a join ``membership`` and ``shadow``, which is torch's wire, know who has data. All
of it knows torch, and no stager, registry or Hydra.
"""
