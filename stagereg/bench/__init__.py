"""Benchmarks for users: ``stagereg bench staging|stall``.

Each benchmark measures stagereg's components and torch's implementations alternately, and reports ratios to the ceiling
(= the highest speed of the machine for the same bytes). ``command`` is the command line, ``measure`` takes the samples,
``states`` builds the state dicts, ``ceiling`` measures the highest speed, ``staging`` and ``stall`` define the rows,
and ``report`` prints the results. The project's own benchmarks are in ``tests/benchmarks``.
"""
