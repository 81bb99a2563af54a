"""Triton builds a launcher for each kernel with a C compiler, against Python's headers."""

import os
import shutil
import sysconfig
from pathlib import Path


def find_c_compiler() -> str | None:
    """Path of the compiler that Triton would take; None if it or Python.h is missing, as a first launch would fail."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, for packages; the headers are Python's own
        scheme = "posix_prefix"
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").is_file():
        return None
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))), None)
