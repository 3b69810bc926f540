"""Converts the program's objects to entries of a checkpoint, modules and optimizers by the names of parameters."""
