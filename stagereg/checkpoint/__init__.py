"""Checkpoints: stage, write in the background, commit atomically, keep the newest, restore.

Start at :mod:`stagereg.checkpoint.checkpointer`, the only room here that users hold in the hand. Below it, each room
has one idea.

The way there: ``options`` what may be asked for, ``saving`` one save from the copy to the commit, with all ranks,
``writing`` what is around it on this one, ``background`` the thread, ``process`` a process that writes in its place and
``remote`` what that is asked, ``agreement`` the ranks, ``advice`` what to do about a disk's errors, ``causes`` all
errors behind one, ``points`` the named moments, ``schedule`` when to save, ``interval`` how often that is best,
``leaving`` when to leave.

What is saved: ``entries``, with ``structure`` and ``rng`` as parts of it, ``pickled`` what is no tensor, ``zero``
shards of optimizers, ``torchfiles`` torch's planning around it, ``storage`` the bytes in the files, ``layout`` what a
checkpoint is made of, ``place`` where it lies and how it gets its name there, ``lock`` who may write there.

The way back: ``choosing`` which one, ``damage`` what is wrong with the others, ``restoring`` how it is loaded,
``sources`` where in it a rank finds its part, ``trusted`` how pickles are read without being run, ``export`` one file
of it for other programs.
"""
