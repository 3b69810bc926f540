"""The kernel: the one place that copies a tensor for staging, and the one place that speaks the join wire.

``tree`` takes a state dict apart and puts it together again, ``layout`` says where each tensor lies in host memory,
``memory`` owns that memory and lends it out, ``copy`` moves the bytes; ``shadow`` is the wire of a join.
It knows torch, and no stager, no registry and no Hydra.
"""
