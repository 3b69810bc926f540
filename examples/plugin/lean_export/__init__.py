"""A bfloat16 export next to the full checkpoint, a weight average for uneven inputs, and other example plugins.

``stager`` defines ``stager=bf16``. ``joinable`` and ``hook`` keep the weight average (``average``) equal on all ranks
while some ranks have no data left. ``timed`` replaces the built-in hook ``ddp``. ``after_commit`` writes a line per
checkpoint to a file, ``retention`` is a retention rule, ``storage`` compresses, and ``tier`` is a local tier on a disk.
The modules ``*_contract`` define how ``stagereg check`` tests each plugin.

An application imports none of these modules: stagereg finds the components through the entry points of this package.
"""
