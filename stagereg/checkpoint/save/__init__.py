"""One save: staged, written, committed, and what follows. Knows nothing of :mod:`stagereg.checkpoint.load`."""
