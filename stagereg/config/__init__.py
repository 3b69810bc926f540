"""Configuration: registered components as typed Hydra options, and building components from a config.

``source`` lists the registry's names for Hydra, ``schema`` creates a typed config from a component's signature, and
``instantiate`` builds only registered components from a config.
"""
