"""Checkpoints: stage, write in the background, commit atomically, keep the newest, restore.

What a program holds stands here: :mod:`.checkpointer`, with its :mod:`.options`, :mod:`.hold` and :mod:`.together`,
and for plain torch :mod:`.dcp_writer`. Below it are seven rooms, to be read from the ground up, floor by floor; those
of one floor do not know each other: ``format``, what a checkpoint is; ``store``, where checkpoints lie, and
``state``, what of the program is in one; ``storage``, which bytes are in their files, and ``ranks``, what is done
with the other ranks; then ``save`` and ``load``.
"""
