"""Interop: checkpoints of plain torch, safetensors files, and tools to read a checkpoint outside a run."""
