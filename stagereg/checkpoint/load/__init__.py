"""Restores: choose a checkpoint, and load it into objects. Does not import :mod:`stagereg.checkpoint.save`."""
