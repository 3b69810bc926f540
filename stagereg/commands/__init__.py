"""The subcommands of ``stagereg``. Each module has a function ``add_to`` for the dispatcher in ``stagereg.cli``."""
