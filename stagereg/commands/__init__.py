"""The subcommands of ``stagereg``. Each module has an ``add_to`` for the dispatcher in ``stagereg.cli``."""
