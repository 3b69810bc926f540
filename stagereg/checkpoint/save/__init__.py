"""Stages, writes and commits a save, on all ranks. Does not import :mod:`stagereg.checkpoint.load`."""
