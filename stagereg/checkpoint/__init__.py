"""Checkpoints: stage, write in the background, commit atomically, keep the newest, restore.

Start at :mod:`stagereg.checkpoint.checkpointer`; users call it, and :mod:`stagereg.checkpoint.opened`, and nothing else
here. One idea a module:

Saving: ``options`` checks the arguments, ``saver`` stages, ``pending_save`` is one save, ``background`` the thread that
works them off, ``committing`` what it does with each, ``backward`` the moment for that, ``sharing`` what ranks have
alike, and each a share of, ``state_planner`` who writes what, ``requests`` what ranks do together, ``rank_group`` the
ranks, ``unchanged`` what they need not send again, ``ending`` how they end, ``advice`` the hint for an error of a disk,
``failpoints`` the named moments of a save, ``schedule`` when to save, ``interval`` how often is best,
``preemption_consensus`` when to leave.

The content: ``entries``, with ``rng`` as a part of it, ``module_state`` and ``optimizer_state`` state by the names of
parameters, ``encoding`` its structure as JSON, ``merging`` what ranks have of one entry put together, ``pickled``
objects that JSON cannot carry, ``index`` where each tensor lies, ``storage`` the bytes in the files, ``manifest`` the
parts of a checkpoint, ``store`` the directory that has them, ``lock`` who may write there.

Restoring: ``restoring`` chooses a checkpoint and loads it, ``damage`` is what is wrong with others, ``reading`` reads
files, ``shared_read`` reads each byte once for all ranks, ``matching`` finds what other programs have saved,
``export`` makes one file of a checkpoint for other programs, ``opened`` a mapping of names to tensors;
``located`` is what a path means. For plain torch: ``dcp_writer``.
"""
