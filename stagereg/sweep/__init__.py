"""Compares the jobs of a Hydra sweep: reads the records of runs, computes metrics, and reports the best combination.

The modules need only the files of the runs. ``run`` reads the records that ranks wrote, ``figures`` computes the
metrics that ``metric`` defines, ``result`` reads and writes the result file of a job, ``comparison`` tests which
differences are significant, and ``answer`` summarizes the comparison. ``callback`` is the Hydra callback. ``render``
creates tables, plots and HTML reports. ``interleaved`` is the Hydra sweeper. Reading files does not import torch.
"""
