"""Sweeps that end in an answer: reads what runs have recorded, computes figures, compares them and shows them.

Everything here works on files, so it does not matter who started the runs, or when. ``run`` reads the lines that the
ranks of one run have written (:mod:`stagereg.record`); ``metric`` names the figures and what they mean; ``figures``
computes them; ``result`` is what one job of a sweep leaves behind; ``compare`` puts jobs side by side and judges which
differences are real, ``answer`` puts that into a sentence, ``comparison_warnings`` lists what to beware of.
``callback`` is called by Hydra, ``render`` makes tables, pictures and pages; ``timeline`` and ``trace`` show single
runs; ``interleaved`` and ``optuna_sweeper`` choose jobs.

Reading imports no torch.
"""
