"""Adapters for people who train with accelerate, Lightning, the Hugging Face Trainer, torchtitan or Ray Train.

One module a trainer, on the public :class:`stagereg.Checkpointer` and :class:`stagereg.Join` alone. Each is imported by
the program that wants it, and imports its trainer; nothing else here does.
"""
