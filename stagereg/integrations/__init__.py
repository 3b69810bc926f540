"""Adapters for accelerate, Lightning, the Hugging Face Trainer, torchtitan and Ray Train.

Each module supports one trainer library, with the public :class:`stagereg.Checkpointer` and :class:`stagereg.Join`.
stagereg itself never imports these modules, because each module imports the trainer library.
"""
