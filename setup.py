"""Lists the packages to install; all other facts about the distribution are in pyproject.toml.

Also builds the C parts of ``stagereg.kernel``; without a C compiler, setuptools prints a warning and omits them.
"""

from setuptools import Extension, find_packages, setup

BESIDE = ["hydra_plugins", "stagereg.conf", "stagereg.example", "stagereg.program"]
COMPILED = [
    Extension(f"stagereg.kernel._{name}", [f"stagereg/kernel/{name}.c"], extra_compile_args=["-O2"], optional=True)
    for name in ("copy", "tensors")
]

setup(packages=[*BESIDE, *find_packages(include=["stagereg", "stagereg.*"])], ext_modules=COMPILED)
