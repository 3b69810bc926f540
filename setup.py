"""Lists the packages to install; all other facts about the distribution are in pyproject.toml.

Also builds the C part of ``stagereg.kernel``; without a C compiler, setuptools prints a warning and omits it.
"""

from setuptools import Extension, find_packages, setup

BESIDE = ["hydra_plugins", "stagereg.conf", "stagereg.example", "stagereg.program"]
COPY = Extension("stagereg.kernel._copy", ["stagereg/kernel/copy.c"], extra_compile_args=["-O2"], optional=True)

setup(packages=[*BESIDE, *find_packages(include=["stagereg", "stagereg.*"])], ext_modules=[COPY])
