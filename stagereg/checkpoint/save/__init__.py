"""One save: ``saver`` stages on the training thread, ``background`` is the thread, ``committing`` what it does.

Knows nothing of :mod:`stagereg.checkpoint.load`.
"""
