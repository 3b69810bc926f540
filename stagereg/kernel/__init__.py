"""The kernel: what several plugins use to copy a state dict, and to join ranks that have no data left.

``copier`` makes a copy, with the modules beside it. In a join ``membership``, or ``shadow`` on torch's wire, knows who
still has data. All of it knows torch, and no stager, registry or Hydra.
"""
