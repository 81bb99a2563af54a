"""Triton builds a launcher for each kernel with a C compiler."""

import os
import shutil


def find_c_compiler() -> str | None:
    """Path of the compiler that Triton would take."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))), None)
