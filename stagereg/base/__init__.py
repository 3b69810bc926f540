"""Small modules that all other subpackages use, without dependencies on staging, joining or checkpoints."""
