"""Build script: the extension dist_prims._backend. The metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        "dist_prims is built against the torch that it will run with, and there is none in this environment. "
        "Install torch 2.11 or later first, then: pip install --no-build-isolation ."
    ) from error

# Without contraction a * b + c rounds twice on every processor: the same bits everywhere.
FLAGS = ["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]

setup(
    ext_modules=[
        CppExtension(
            "dist_prims._backend",
            sources=sorted(map(str, [*Path("csrc/core").glob("*.cpp"), *Path("csrc/backend").glob("*.cpp")])),
            depends=sorted(map(str, Path("csrc").rglob("*.h"))),
            define_macros=[("DIST_PRIMS_TORCH", f'"{torch.__version__}"')],
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
