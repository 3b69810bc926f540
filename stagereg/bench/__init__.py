"""Benchmarks for users: ``stagereg bench staging|stall``.

Each benchmark interleaves registered components with torch's implementations in one run, and reports ratios to the
machine's best speed, measured in the same rounds. ``command`` is the command line, ``measure`` takes the samples,
``states`` has the state dicts, ``ceiling`` the machine's best speed, ``staging`` and ``stall`` the rows, ``report``
the output. The project's own benchmarks are in ``tests/benchmarks``.
"""
