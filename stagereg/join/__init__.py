"""Joins: training goes on, with the right numbers, when ranks run out of data at different steps.

``protocol`` has torch's names, ``context`` the ``Join`` itself; ``joinables`` say what takes part in it and ``hooks``
what a rank does for each of them once it has no more data.
"""
