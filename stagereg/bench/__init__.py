"""Benchmarks, as part of the product: ``stagereg bench staging|stall``.

Each kind measures what is registered beside torch's own ways, interleaved in one run, as ratios to what the machine can
do at best, measured in the same rounds. Start at ``command``, the command line; ``measure`` takes the samples,
``states`` has what is staged, ``ceiling`` what the machine can do; ``staging`` and ``stall`` have the rows; ``report``
has the output. What the project measures for itself is in ``tests/benchmarks``.
"""
