"""The sub-commands of ``stagereg``, one a file, each with an ``add_to`` for the dispatcher in ``stagereg.cli``."""
