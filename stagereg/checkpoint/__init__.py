"""Checkpoints: staging, background writes, atomic commits, retention and restores.

Programs use :mod:`.checkpointer`, with its :mod:`.options`, its directory lock (:mod:`.hold`) and its coordination of
the ranks (:mod:`.together`). Seven subpackages in four layers follow, the lowest first; subpackages of one layer do not
import each other. ``format`` has the parts of a checkpoint. ``store`` accesses checkpoint directories, and ``state``
the program's objects. ``storage`` reads and writes files, and ``ranks`` has the exchanges between ranks. ``save`` and
``load`` are the top layer.
"""
