"""Adapters for accelerate, Lightning, the Hugging Face Trainer, torchtitan and Ray Train.

Each module serves one trainer and uses the public :class:`stagereg.Checkpointer` and :class:`stagereg.Join`. Only the
user's program imports such a module, because the module imports its trainer.
"""
