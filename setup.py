"""Finds the packages, so that none can be forgotten; everything else about the distribution is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=["hydra_plugins", "stagereg.conf", "stagereg.example", *find_packages(include=["stagereg", "stagereg.*"])])
