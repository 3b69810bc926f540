"""Joins: training goes on, with the right numbers, when ranks run out of data at different steps.

``joinable`` declares what takes part, with torch's names, ``context`` has the ``Join`` itself, ``kinds`` a joinable and
its hook in each file.
"""
