"""Sweeps that end in an answer: what runs have recorded is read, made into figures, compared and shown.

Everything here works on files, so it does not matter who started the runs, or when. ``run`` reads the lines that the
ranks of one run have written (:mod:`stagereg.record`); ``metrics`` names the figures there are and what they mean;
``figures`` computes them; ``result`` is what one job of a sweep leaves behind; ``compare`` puts jobs side by side and
judges which differences mean something, ``answer`` puts that into a sentence, ``caveats`` says what to beware of.
``callback`` is where Hydra comes in, ``render`` where tables, pictures and pages are made; ``timeline`` and
``tensorboard`` show single runs, ``tuning`` searches.

Reading imports no torch.
"""
