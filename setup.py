"""Finds the packages, so that none can be forgotten; everything else about the distribution is in pyproject.toml.

Also names the compiled part of ``stagereg.kernel``, which is left out, with a warning, where there is no C compiler.
"""

from setuptools import Extension, find_packages, setup

BESIDE = ["hydra_plugins", "stagereg.conf", "stagereg.example", "stagereg.program"]
COPY = Extension("stagereg.kernel._copy", ["stagereg/kernel/copy.c"], extra_compile_args=["-O2"], optional=True)

setup(packages=[*BESIDE, *find_packages(include=["stagereg", "stagereg.*"])], ext_modules=[COPY])
