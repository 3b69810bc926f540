"""The kernel: the one place that copies a tensor for staging, and the one place that speaks the join wire.

A copy: ``tree`` and ``leaves`` take a state dict apart and put it together again, ``names`` says what its tensors are
called, ``layout`` where each lies in host memory, and ``replay`` recognises a state dict that was seen before.
``moves`` and, for many small pieces, ``vectored`` move the bytes; ``copy`` has all of that done.

Its memory: ``memory`` owns it and lends it out, with ``waiting`` and ``writers`` telling how long to wait for its
return; in ``blocks`` several copies share it, in ``sharing`` and ``parcel`` other processes read it, and ``room`` is
what is left free around tensors for a storage.

Other ways to copy: ``overlap`` later, with ``changes`` telling whether the source was written meanwhile; ``bounded`` in
less memory than the state has; ``delta`` only what changed, with ``compare`` to find out.

A join: ``shadow`` is torch's wire. Where all ranks run stagereg, ``membership`` is how they know who still has data,
over ``side``, small collectives beside those of training; ``tally`` and ``desk`` answer for a rank that has left.
``alarm`` tells all ranks what has gone wrong on one: ``watch`` is its thread, ``board`` its words in the store, and
``abort`` ends a collective that would wait for ever.

All of it knows torch, and no stager, registry or Hydra.
"""
