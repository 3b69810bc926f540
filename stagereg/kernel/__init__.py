"""The kernel: what several plugins use to copy a state dict, and to join ranks that have no data left.

A copy: ``state_dict`` takes a state dict apart and puts its copy together, ``layout`` plans where each tensor lies in
host memory, ``memory`` lends that memory, ``transfer`` moves the bytes, and ``copier`` has all of that done.

A join: ``shadow`` matches the collectives of torch's wire on a rank without data. Where all ranks run stagereg,
``membership`` knows which ranks still have data, over ``channel``, small collectives beside those of training.

All of it knows torch, and no stager, registry or Hydra.
"""
