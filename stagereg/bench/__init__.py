"""Benchmarks, as part of the product: ``stagereg bench staging|write|stall|join``.

Each kind measures what is registered beside torch's own ways, interleaved in one run, as ratios to what the machine can
do at best, or to the step without a join, measured in the same rounds. Start at ``command``, the command line;
``measure`` is how figures come about, ``states`` what is staged and written, ``ceiling`` what the machine can do;
``staging``, ``write``, ``stall`` and ``join`` have the rows (``loop`` is what stall runs in a process of its own,
``joinrank`` what join runs on each rank); ``targets`` what is to be reached; ``machine`` and ``report`` what is said
about it.
"""
