"""A small bfloat16 export beside the full checkpoint, and an average of the weights that outlasts uneven inputs.

``stager`` has what ``stager=bf16`` chooses. ``joinable`` and ``hook`` keep the average of ``average`` equal on all
ranks while some have no data left. ``timed`` has a hook in the place of the built-in ``ddp``, ``after_commit`` a
file with a line for each checkpoint, ``retention`` a rule for which checkpoints are retained, ``tier`` a disk for steps
nearer than the store. ``*_contract`` are how each of them is checked.

An application names none of these modules: stagereg finds the components by the entry points of this package.
"""
