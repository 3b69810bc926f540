"""Proofs of checkpoints: whether a run that resumes from a checkpoint continues like the run that saved it.

With ``prove.steps=k``, a run records digests of the ``k`` steps after each save (:mod:`.recording`). The command
``stagereg prove`` starts the program from the checkpoint, without saves, and compares its first ``k`` steps with the
record (:mod:`.command`, :mod:`.comparing`). docs/prove.md describes the verdicts.
"""
