"""The sub-commands of ``stagereg`` about plugins: what there is, a new one, whether it keeps its promises.

One command a file, each with an ``add_to`` for the dispatcher in ``stagereg.cli``; ``output`` is how they speak.
"""
