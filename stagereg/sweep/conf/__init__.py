"""The options of sweeps, on Hydra's search path."""
