"""Directories of checkpoints, local or remote, and how a written checkpoint gets its name there.

``checkpoint_store`` is the protocol. ``local_store`` is a directory of this machine's file systems, shared ones
included, where a checkpoint is committed by renaming it. ``remote_store`` is a prefix of an object store, reached
through fsspec, which cannot rename: there a checkpoint is committed by its manifest, the object that is written last.
``open_store`` makes one of a path or URL, ``object_store`` has the requests, ``lease`` the lock, and ``retry`` says how
often a request is tried that a network may lose.

What a checkpoint consists of, its manifest and its marks, is the same in both: :mod:`stagereg.checkpoint.manifest`. The
bytes in its files are written by a storage.
"""
