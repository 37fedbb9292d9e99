"""The C kernels: one shared library for each instruction set, all from the same sources.

They are optional: without a compiler the installation succeeds, and attention runs in torch.
"""

import platform
from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/ragcache_kernels/native/src")
FLAGS = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
DOT_PRODUCTS = ["-mavx512bf16", "-mavx512vnni"]
TIERS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    TIERS |= {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": [*AVX512, *DOT_PRODUCTS]}


class Libraries(build_ext):
    """Libraries for ctypes: no Python in them, so no version of it in their names."""

    def finalize_options(self):
        """All at once."""
        super().finalize_options()
        self.parallel = self.parallel or len(TIERS)

    def build_extension(self, ext):
        """With objects of its own: those of another tier, from the same sources, have its name."""
        own = copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        build_ext.build_extension(own, ext)

    def get_ext_filename(self, fullname):
        """Where the library of a tier lies."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext):
        """No function that starts a Python module."""
        return ext.export_symbols


class Wheel(bdist_wheel):
    """One wheel of a platform for every Python."""

    def get_tag(self):
        """Python, its ABI, the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"ragcache_kernels.native.{tier}",
            sources=sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for tier, flags in TIERS.items()
    ],
    cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel},
)
