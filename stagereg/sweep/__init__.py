"""Sweeps that end in an answer: reads what runs have recorded, computes figures, compares them and shows them.

Everything here works on files, so it does not matter who started the runs, or when. ``run`` reads what ranks recorded,
``figures`` computes what ``metric`` names, ``result`` is what a job leaves; ``comparison`` judges which differences are
real, ``answer`` says so. ``callback`` is called by Hydra, ``render`` makes tables, pictures and pages; ``interleaved``
chooses jobs. Reading imports no torch.
"""
