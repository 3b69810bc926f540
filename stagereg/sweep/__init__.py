"""Compares the jobs of a sweep: reads the records of runs, computes metrics and reports the best combination.

All modules work on files, independent of the process that started the runs. ``run`` reads the records of ranks,
``figures`` computes the metrics that ``metric`` defines, ``result`` reads and writes the result file of a job,
``comparison`` tests which differences are significant, and ``answer`` summarizes the result. Hydra calls ``callback``.
``render`` creates tables, plots and HTML reports; ``interleaved`` selects jobs. Reading does not import torch.
"""
