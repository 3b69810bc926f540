"""Directories of checkpoints, local or remote, and how a written checkpoint gets its name there.

``checkpoint_store`` is one in a file system, ``remote_store`` what is otherwise in an object store, and ``open_store``
makes one of a path or URL. Below ``remote_store``, ``object_store`` has the requests, ``lease`` the lock, and ``retry``
says how often a request is tried that a network may lose.
"""
