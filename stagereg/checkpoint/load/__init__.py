"""One restore: ``restoring`` chooses a checkpoint and loads it, ``placing`` says into what.

Also ``opened``, a checkpoint as a mapping of names to tensors, and ``export``, one file of it. Knows nothing of
:mod:`stagereg.checkpoint.save`.
"""
