"""Lists the packages to install; all other facts about the distribution are in pyproject.toml.

Also builds the C parts of ``stagereg.kernel`` and ``stagereg.base``. Without a C compiler, setuptools prints a warning
and omits them.
"""

from setuptools import Extension, find_packages, setup

BESIDE = ["hydra_plugins", "stagereg.conf", "stagereg.example", "stagereg.program"]
COMPILED = [
    Extension(f"stagereg.{part}._{name}", [f"stagereg/{part}/{name}.c"], extra_compile_args=["-O2"], optional=True)
    for part, name in (("kernel", "copy"), ("base", "tensors"))
]

setup(packages=[*BESIDE, *find_packages(include=["stagereg", "stagereg.*"])], ext_modules=COMPILED)
