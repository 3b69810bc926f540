"""The kernel: the one place that copies a tensor for staging, and the one place that speaks the join wire.

``tree`` and ``leaves`` take a state dict apart and put it together again, ``layout`` says where each tensor lies in
host memory, ``memory`` owns that memory and lends it out, with ``writers`` telling whether to wait for its return, and
``copy`` moves the bytes. ``shadow`` is the wire of a join. All of it knows torch, and no stager, registry or Hydra.
"""
