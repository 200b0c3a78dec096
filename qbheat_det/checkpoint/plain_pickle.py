# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads pickles of NumPy arrays as data: no name in a file is imported or called.

Python's own ``Unpickler`` is not used. Restricted to a table of names it runs no code, but a small
file can still exhaust memory (an index of 2**31 in its memo), or hash a nested tuple for ever.
Integers of any size can be chosen to have the same hash, so larger ones are refused as keys.
"""

import math
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qbheat_det.core.errors import UserError

_MAX_OPERATIONS = 500_000  # a detector takes about 10,000
_MAX_PROTOCOL = 5
_MAX_KEY = 2**60  # Python hashes integers modulo 2**61 - 1
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
# Operations whose argument is a value: a number, a string or bytes.
_VALUES = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def read_plain_pickle(path: str) -> Any:
    """Returns the content of a pickle: dicts, lists, tuples, strings, numbers and NumPy arrays.

    Strings of Python 2 are read as Latin-1. Attributes of an ``OrderedDict`` are left out. Time and
    memory are proportional to the size of the file.

    Raises:
        UserError: the file is empty or damaged, or names anything else, which could run code.
    """
    try:
        content = Path(path).read_bytes()
        return _Reader(path, len(content)).read(content)
    # An operation in a broken file can get any value, also one that is too large.
    except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"'{path}' cannot be read as a pickle of NumPy arrays: it is truncated, or another "
            f"kind of file ({type(error).__name__})"
        ) from error


class _Reader:
    """Executes the operations of a pickle on a stack, as Python's documentation describes them."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        # Every array has its own bytes in the file, once as text and once as bytes at most. A file
        # that takes the same bytes for many arrays is refused.
        self._bytes_left = 2 * size
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Any] = {
            "numpy ndarray": "numpy ndarray",  # only an argument of ``_reconstruct``
            "numpy dtype": self._find_dtype,
            "collections OrderedDict": _make_empty(dict),
            "_codecs encode": self._encode,
        }
        for module in ("__builtin__", "builtins"):
            self._globals[f"{module} bytes"] = _make_empty(bytes)
        for module in ("numpy.core", "numpy._core"):  # of NumPy 1 and 2
            self._globals[f"{module}.multiarray _reconstruct"] = _reconstruct
            self._globals[f"{module}.multiarray scalar"] = self._make_scalar
            self._globals[f"{module}.numeric _frombuffer"] = self._make_array

    def read(self, content: bytes) -> Any:
        """Returns the object that the whole pickle describes."""
        for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if count > _MAX_OPERATIONS:
                raise UserError(f"'{self._path}' is refused: it has too many values for weights")
            self._execute(operation.name, argument)
        (result,) = self._stack
        return result

    def _execute(self, name: str, argument: Any) -> None:
        if name == "PROTO":
            if argument > _MAX_PROTOCOL:
                raise ValueError
        elif name in ("FRAME", "STOP"):
            pass
        elif name == "MARK":
            self._outer.append(self._stack)
            self._stack = []
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self._stack.append(tuple(self._pop(int(name[-1]))))
        elif name == "TUPLE":
            items = self._pop_to_mark()
            self._stack.append(tuple(items))
        elif name == "LIST":
            items = self._pop_to_mark()
            self._stack.append(items)
        elif name == "DICT":
            items = self._pop_to_mark()
            self._stack.append({})
            self._set_items(items)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._pop_to_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._pop_to_mark()
            self._set_items(items)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            if argument > _MAX_KEY:
                raise ValueError
            self._memo[argument] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self._stack.append(self._find_global(argument))
        elif name == "STACK_GLOBAL":
            self._stack.append(self._find_global(" ".join(self._pop(2))))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            # All functions on the stack are those of ``_globals``.
            self._stack.append(function(*arguments))
        elif name == "BUILD":
            (state,) = self._pop(1)
            self._set_state(self._stack[-1], state)
        else:
            raise UserError(f"'{self._path}' is refused: it has {name}, which can run code")

    def _pop(self, count: int) -> list[Any]:
        """Removes and returns the last ``count`` objects of the stack, in order."""
        items = [self._stack.pop() for _ in range(count)]
        return items[::-1]

    def _pop_to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise TypeError
        return top

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):  # the hash of a nested tuple can crash Python
                raise TypeError
            if isinstance(key, int) and abs(key) > _MAX_KEY:
                raise ValueError
            target[key] = value

    def _find_global(self, name: str) -> Any:
        if name not in self._globals:
            short_name = name.replace(" ", ".")[:100]
            raise UserError(
                f"'{self._path}' is refused: it names {short_name!a}, which can run code; only "
                "dicts, strings, numbers and NumPy arrays are read, such as tensor.numpy()"
            )
        return self._globals[name]

    def _find_dtype(self, name: str, *_: Any) -> np.dtype[Any]:
        if name not in _DTYPES:  # such as "O8", an array of objects
            raise UserError(
                f"'{self._path}' is refused: it has arrays of the type {str(name)[:20]!a}; only "
                "integers, bool, float16, float32 and float64 are read"
            )
        return np.dtype(name)

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        """Returns bytes, which pickles before protocol 3 store as text."""
        if encoding != "latin1":
            raise ValueError
        return self._as_bytes(text)

    def _as_bytes(self, data: Any) -> bytes:
        """Returns a copy of bytes, or of a string of Python 2."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise MemoryError
        if isinstance(data, str):
            return data.encode("latin1")
        if not isinstance(data, bytes | bytearray):
            raise TypeError
        return bytes(data)

    def _set_state(self, target: Any, state: Any) -> None:
        if isinstance(target, np.dtype):
            if state[1] not in ("<", "|", "="):
                raise UserError(
                    f"'{self._path}' has big-endian arrays: save them as little-endian, such as "
                    "array.astype('<f4')"
                )
        elif isinstance(target, np.ndarray):
            _, shape, dtype, is_fortran, data = state
            self._fill(target, shape, dtype, is_fortran, data)
        elif not isinstance(target, dict):
            raise TypeError

    def _fill(self, array: Any, shape: Any, dtype: Any, is_fortran: Any, data: Any) -> None:
        """Sets dtype, shape and values of an array, after a check of all of them."""
        if not isinstance(dtype, np.dtype) or not isinstance(shape, tuple) or len(shape) > 32:
            raise TypeError
        if any(not isinstance(length, int) or not 0 <= length < 2**40 for length in shape):
            raise ValueError
        content = self._as_bytes(data)
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError
        array.__setstate__((1, shape, dtype, bool(is_fortran), content))

    def _make_array(
        self, data: Any, dtype: Any, shape: Any, order: str, axes: tuple[int, ...] | None = None
    ) -> Any:
        """Returns an array; with the order "K", its axes are those of the stored array permuted."""
        array = np.empty(0)
        self._fill(array, shape, dtype, order == "F", data)
        if order == "K" and axes is not None:
            return array.transpose(axes)
        if order not in ("C", "F"):
            raise ValueError
        return array

    def _make_scalar(self, dtype: Any, data: Any) -> bool | int | float:
        return self._make_array(data, dtype, (), "C").item()


def _reconstruct(*_: Any) -> Any:
    """Returns an array that BUILD fills."""
    return np.empty(0)


def _make_empty(kind: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function without arguments, since ``kind(…)`` itself could take a large number."""
    return lambda: kind()
