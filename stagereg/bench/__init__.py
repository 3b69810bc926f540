"""Benchmarks, as part of the product: ``stagereg bench staging|write|stall|join|replicas|restore|endurance``.

Each kind measures what is registered beside torch's own ways, interleaved in one run, as ratios to what the machine can
do at best, or to the step without a join, measured in the same rounds. Start at ``command``, the command line;
``measure`` takes the samples, ``states`` has what is staged and written, ``ceiling`` what the machine can do;
``staging``, ``write``, ``stall``, ``join_rows`` and ``replicas`` have the rows, of which the last two take turns
``on_ranks``; ``report`` has the output.
"""
