"""Builds `memckpt._native`. Everything else is said in pyproject.toml.

Environment
-----------
MEMCKPT_DEBUG=1
    No optimization, assertions on.
MEMCKPT_SANITIZE=address|undefined|thread
    Instrument the extension (comma-separated); the interpreter then needs the runtime preloaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

HERE = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(HERE)) for p in (HERE / "csrc").glob("*.cpp"))
HEADERS = sorted(str(p.relative_to(HERE)) for p in (HERE / "csrc").glob("*.hpp"))

compile_args = ["-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
link_args = ["-pthread"]
if os.environ.get("MEMCKPT_DEBUG"):
    compile_args += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
else:
    # No -march: the extension must run on any x86-64; kernels.cpp picks what the CPU has at run time.
    compile_args += ["-O3", "-g0"]
if sanitizers := os.environ.get("MEMCKPT_SANITIZE"):
    flags = [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
    compile_args += flags
    link_args += flags

setup(
    ext_modules=[
        Pybind11Extension(
            "memckpt._native",
            SOURCES,
            depends=HEADERS,
            cxx_std=17,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
