"""Checkpoints: stage, write in the background, commit atomically, keep the newest, restore.

What a program holds stands here: :mod:`.checkpointer`, its :mod:`.options`, and for plain torch :mod:`.dcp_writer`.
Below it are seven rooms, to be read from the ground up; a room imports those named before it, and no other:
``format``, what a checkpoint is; ``store``, where checkpoints lie; ``storage``, which bytes are in their files;
``state``, what of the program is in one; ``ranks``, what is done with the other ranks; then ``save`` and ``load``,
which do not know each other.
"""
