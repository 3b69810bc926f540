"""Directories of checkpoints, local or remote, and how a written checkpoint gets its name there.

``checkpoint_store`` is the protocol, ``local_store`` and ``remote_store`` are its two forms, and ``open_store`` makes
one of a path or URL. Below ``remote_store``, ``object_store`` has the requests, ``lease`` the lock, and ``retry`` says
how often a request is tried that a network may lose.
"""
