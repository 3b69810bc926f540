"""Callbacks: functions that rank 0 calls with each complete checkpoint, for example to copy it."""
