"""Checkpoints: stage, write in the background, commit atomically, keep the newest, restore.

Start at :mod:`stagereg.checkpoint.checkpointer`, the only module here that users call. One idea a module:

Saving: ``options`` checks the arguments, ``pending_save`` is one save, from the copy to the commit, ``state_planner``
who writes what, ``background`` the thread that writes, ``writer_process`` a process that does, ``rank_group`` the
ranks, ``advice`` the hint for an error of a disk, ``failpoints`` the named moments of a save, ``schedule`` when to
save, ``interval`` how often is best, ``preemption_consensus`` when to leave.

The content: ``entries``, with ``rng`` as a part of it, ``encoding`` their structure as JSON, ``pickled`` objects that
JSON cannot carry, ``index`` where each tensor lies, ``zero_shards`` shards of optimizers, ``storage`` the bytes in the
files, ``manifest`` the parts of a checkpoint, ``store`` the directory that has them, ``lock`` who may write there.

Restoring: ``choosing`` which checkpoint, ``damage`` what is wrong with the others, ``restoring`` how it is loaded,
``sources`` which part a rank reads, ``reading`` reads it, ``export`` makes one file of it for other programs,
``foreign`` reads what torch alone has written.
"""
