"""Interop: checkpoints of plain torch, safetensors files, and reading a checkpoint outside a run."""
