"""Configuration: registered components as typed Hydra options, and building them from a config.

``source`` offers the registry's names to Hydra, ``schema`` makes a typed config from a component's signature,
``instantiate`` builds from a config what is registered and nothing else.
"""
