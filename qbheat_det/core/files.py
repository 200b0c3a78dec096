# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Atomic writes, inter-process locks, SHA-256, and dataclasses from untrusted JSON."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import logging
import os
import shutil
import sys
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args, get_origin

from filelock import FileLock, Timeout

from .errors import UserError

if TYPE_CHECKING:  # tools that print --help do without
    from torch import Tensor
if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

# No reader mistakes a hidden file with this suffix for a checkpoint.
_SUFFIX = ".incomplete"
_NO_RIGHTS = "you may not write there; change the folder's rights, or choose another one"
_NO_FOLDER = "a file exists where a folder is needed; choose another folder"
_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space, or choose another folder",
    errno.EDQUOT: "your share of the disk is used up; free some space, or choose another folder",
    errno.EFBIG: "no file may grow that large there; raise the limit, or choose another folder",
    errno.EACCES: _NO_RIGHTS,
    errno.EPERM: _NO_RIGHTS,
    errno.EROFS: "that file system is read-only; choose another folder",
    errno.EISDIR: "a folder has that name; choose another name",
    errno.EEXIST: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.ENAMETOOLONG: "that name is too long for the file system; choose a shorter one",
    errno.ENOENT: "no file can be made there; choose another folder",
}


def write_atomically(
    path: str | os.PathLike[str], write: bytes | Callable[[BinaryIO], object]
) -> None:
    """Writes a file so that it always has either the complete new content or the old content.

    Writes a temporary file in the same folder, syncs it to the disk and renames it. Creates missing
    folders. ``write`` is the content, or a function that writes the content to a stream. Raises a
    ``UserError`` if the file cannot be written; the old file is then unchanged.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial, stream = _open_partial(target)
        try:
            _write_to_disk(stream, write)
            if sys.platform == "win32":  # open files have no locks and keep their names there
                stream.close()
            os.replace(partial, target)  # still locked
        except BaseException:
            with contextlib.suppress(OSError):  # closing writes the rest of the buffer again
                stream.close()
            partial.unlink(missing_ok=True)
            raise
        stream.close()
        _sync_folder(target.parent)
    except OSError as error:
        raise _refuse(target, error) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises a ``UserError`` if a file cannot be written; creates no file or folder.

    Call it before a long computation whose results will be written to ``path``.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        ancestor = next((parent for parent in target.parents if parent.exists()), Path())
        if not ancestor.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "")
        if not os.access(ancestor, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "")
    except OSError as error:
        raise _refuse(target, error) from error


def check_output(output: Path, suffix: str, *, overwrite: bool) -> None:
    """Raises a ``UserError`` if ``output`` has another suffix, exists or cannot be written."""
    if output.suffix.lower() != suffix:
        raise UserError(f"--output '{output}' must end in {suffix}")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: choose another name, or pass --overwrite")
    check_writable(output)


def replace_folders(*paths: str | os.PathLike[str]) -> None:
    """Creates empty folders, in place of those that this function created before.

    Raises a ``UserError`` if a folder has other files, or cannot be written. All folders are
    checked before any is deleted.
    """
    mark = ".replaceable"
    for folder in map(Path, paths):
        if folder.is_dir() and any(folder.iterdir()) and not (folder / mark).exists():
            raise UserError(f"'{folder}' has files that would be replaced: choose another --output")
    for folder in map(Path, paths):
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(folder / mark, b"")


def _refuse(target: Path, error: OSError) -> UserError:
    reason = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    return UserError(f"cannot write '{target}': {reason} (an existing file is unchanged)")


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Removes incomplete files of killed processes, except files that are still being written."""
    for partial in Path(folder).glob(f".*{_SUFFIX}"):
        # Errors: a process is writing the file, it no longer exists, or there is no permission.
        with contextlib.suppress(OSError), open(partial, "r+b") as stream:
            _lock(stream)
            partial.unlink()


class _Stream(io.BufferedWriter):
    """Stores the error of a failed write, because ``torch.save`` raises another error instead."""

    fault: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = error
            raise


def _open_partial(target: Path) -> tuple[Path, _Stream]:
    """Opens a new file next to the target, locked so that no process removes it as a leftover."""
    while True:
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{_SUFFIX}")
        stream = _Stream(io.FileIO(partial, "xb"))
        try:
            _lock(stream)
        except BlockingIOError:  # another process is removing it
            stream.close()
            continue
        except OSError:  # not every file system has locks
            pass
        if partial.exists():  # else another process has removed it before it was locked
            return partial, stream
        stream.close()


def _write_to_disk(stream: _Stream, write: bytes | Callable[[BinaryIO], object]) -> None:
    try:
        if isinstance(write, bytes):
            stream.write(write)
        else:
            write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    except Exception:
        if stream.fault is not None:
            raise stream.fault from None
        raise


def _lock(stream: BinaryIO) -> None:
    if sys.platform != "win32":
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str], waiting: str = "") -> Iterator[None]:
    """Context with an inter-process lock, which the system releases if this process is killed.

    ``path`` is a file that is used only for the lock, and is not removed. ``waiting`` is logged if
    another process has the lock.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        if waiting:
            logger.info(waiting)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def get_cache_dir() -> Path:
    """Returns ``$QBHEAT_CACHE``, or else ``qbheat_det`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if os.environ.get("QBHEAT_CACHE"):
        return Path(os.environ["QBHEAT_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "qbheat_det"


def hash_file(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file's content as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, "Tensor"]) -> str:
    """Returns the SHA-256 of tensors: names, dtypes, shapes, values. Ignores device and order."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
        digest.update(array.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parse_record(kind: Any, value: Any, where: str) -> Any:
    """Converts JSON data to the type ``kind``: a dataclass, tuple, ``X | None`` or plain type.

    Integers must not be negative, and floats must be finite. If a field is unknown, missing or of
    the wrong type, raises a ``UserError`` that names the field. ``where`` describes the value in
    the message.
    """
    arguments = get_args(kind)
    origin = get_origin(kind)
    expected = getattr(kind, "__name__", kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _parse_dataclass(kind, value, where)
    if origin is UnionType:
        if value is None:
            return None
        return parse_record(arguments[0], value, where)
    if origin is tuple:
        is_list = isinstance(value, list | tuple)
        if is_list and (... in arguments or len(value) == len(arguments)):
            return tuple(
                parse_record(arguments[0], item, f"{where}[{index}]")
                for index, item in enumerate(value)
            )
    elif origin is Literal:
        if value in arguments:
            return value
        expected = " or ".join(map(repr, arguments))
    elif _is_valid(kind, value):
        return value
    raise UserError(f"{where} is {value!r:.60}, expected {expected}")


def _parse_dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    fields = dataclasses.fields(kind)
    unknown = value.keys() - {field.name for field in fields}
    if unknown:
        raise UserError(f"{where}: the field '{min(unknown)}' is unknown")
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    missing = required - value.keys()
    if missing:
        raise UserError(f"{where}: the field '{min(missing)}' is missing")
    types = typing.get_type_hints(kind)
    arguments = {
        key: parse_record(types[key], item, f"{where}: '{key}'") for key, item in value.items()
    }
    return kind(**arguments)


def _is_valid(kind: type, value: Any) -> bool:
    """Whether a value has a plain type. Floats must be finite, and integers not negative."""
    if kind is float:  # NaN compares as false, and integers in JSON have no upper bound
        return type(value) in (int, float) and abs(value) < 1e300
    if kind is int:
        return type(value) is int and value >= 0
    return type(value) is kind
