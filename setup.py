"""The C core, which is built on Linux only; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

# Limited API of Python 3.11: one binary for every later Python.
CORE = Extension(
    "allhands._core",
    sources=sorted(map(str, Path("csrc").glob("*/*.c"))),
    depends=sorted(map(str, Path("csrc").glob("*/*.h"))),
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    libraries=["m"],
    extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Werror"],
    py_limited_api=True,
)

if sys.platform == "linux":
    setup(ext_modules=[CORE], options={"bdist_wheel": {"py_limited_api": "cp311"}})
else:
    setup()
