"""Checkpoints: stage, write in the background, commit atomically, keep the newest, restore.

Start at :mod:`stagereg.checkpoint.checkpointer`, the only room here that users hold in the hand. Below it, each room
has one idea: ``saving`` one save from the copy to the commit, ``restoring`` the way back, ``entries`` what is saved and
how it comes back, ``structure`` and ``rng`` parts of that, ``torchfiles`` torch's planning around it, ``storage`` the
bytes in the files, ``layout`` what a checkpoint is made of, ``place`` where it lies and how it gets there,
``background`` the thread, ``process`` a process that writes in its place and ``remote`` what that is asked,
``agreement`` the ranks, ``schedule`` when to save, ``interval`` how often that is best.
"""
