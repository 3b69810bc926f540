"""Finds the packages, so that none can be forgotten; everything else about the distribution is in pyproject.toml."""

from setuptools import find_packages, setup

BESIDE = ["hydra_plugins", "stagereg.conf", "stagereg.example"]

setup(packages=[*BESIDE, *find_packages(include=["stagereg", "stagereg.*"])])
