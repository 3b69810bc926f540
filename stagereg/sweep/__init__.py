"""Sweeps with a result: reads the records of runs, computes metrics, compares combinations and reports the best.

All modules work on files, independent of the process that started the runs. ``run`` reads the records of ranks,
``figures`` computes the metrics of ``metric``, ``result`` is the result file of a job, ``comparison`` tests which
differences are significant, ``answer`` states the result. Hydra calls ``callback``, ``render`` makes tables, plots and
HTML reports, ``interleaved`` chooses jobs. Reading imports no torch.
"""
