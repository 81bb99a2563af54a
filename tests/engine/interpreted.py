"""Triton's interpreter without work that has no effect."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Final
from unittest import mock

import numpy as np
from triton.language import core
from triton.runtime import interpreter

# None in a release of Triton that does not have it; then `without_waste` does nothing
PREPARE: Final[Any] = getattr(interpreter, "_patch_lang", None)
DTYPE_OF: Final[Any] = getattr(interpreter, "_get_np_dtype", None)
NOTHING_PREPARED: Final[Any] = getattr(interpreter, "_LangPatchScope", None)
OPTIONS: Final = interpreter.interpreter_builder.options


@contextmanager
def without_waste() -> Iterator[None]:
    """Run kernels in a third of the time, with the same results and checks.

    - The language is prepared once for each launch, and not again for each call of a function in a kernel.
    - Sums of integers are not computed again in 64 bits: without `debug` the interpreter discards whether they overflow.
    - The table of numpy's types is not made again for each value.
    """
    if None in (PREPARE, DTYPE_OF, NOTHING_PREPARED) or not hasattr(OPTIONS, "sanitize_overflow"):
        yield
        return
    assert not OPTIONS.debug
    with (
        mock.patch.object(interpreter, "_patch_lang", _prepare),
        mock.patch.object(interpreter, "_get_np_dtype", _numpy_dtype),
        mock.patch.object(interpreter.interpreter_builder, "options", replace(OPTIONS, sanitize_overflow=False)),
    ):
        yield


def _prepare(function: FunctionType) -> Any:
    if any(core.is_builtin(module.load) for module in _language(function)):
        return PREPARE(function)
    return NOTHING_PREPARED()


@cache
def _language(function: FunctionType) -> list[ModuleType]:
    """Return the modules of the language that the function uses."""
    return [value for value in function.__globals__.values() if value is interpreter.tl or value is core]


def _numpy_dtype(kind: Any) -> "np.dtype[Any]":
    element = kind.scalar
    return DTYPE_OF(element) if isinstance(element, core.pointer_type) else _numpy_scalar(element)


@cache
def _numpy_scalar(kind: Any) -> "np.dtype[Any]":
    return DTYPE_OF(kind)
