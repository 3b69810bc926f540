"""Converts the program's objects to checkpoint entries. Modules and optimizers are stored by parameter name."""
