"""Checkpoints: stage, write in the background, commit atomically, retain the newest, restore.

The modules here are the objects that a program holds: :mod:`.checkpointer`, with its :mod:`.options`, :mod:`.hold` and
:mod:`.together`. Below are seven subpackages in layers; subpackages of one layer do not import each other: ``format``,
the parts of a checkpoint; ``store``, where checkpoints are stored, and ``state``, the program's objects in a
checkpoint; ``storage``, the bytes of their files, and ``ranks``, the exchanges between ranks; then ``save`` and
``load``.
"""
