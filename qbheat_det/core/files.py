# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Atomic writes, locks between processes, checksums, and parsing of untrusted JSON."""

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

if TYPE_CHECKING:  # importing torch would delay --help by seconds
    from torch import Tensor
if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

# Suffix of a file that is being written. It is also hidden, so that it is never read by mistake.
_PARTIAL_SUFFIX = ".incomplete"
_MARK = ".replaceable"  # hidden file in folders that ``replace_folders`` has created
RUN_FILE = "run.json"
"""File in the folder of a run that has the record of all starts."""
_FILES_OF_RUN = (RUN_FILE, "config.yaml")
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
    """Replaces a file so that readers see either the complete new content or the old content.

    Writes a temporary file in the same folder, flushes it to the disk, and renames it. Missing
    folders are created.

    Args:
        path: path of the file.
        write: the new content, or a function that writes it to a stream.

    Raises:
        UserError: the file cannot be written. The old file is unchanged.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial, stream = _open_partial(target)
        try:
            _write_to_disk(stream, write)
            if sys.platform == "win32":  # Windows cannot rename open files
                stream.close()
            # The file is still locked here, so no other process can remove it.
            os.replace(partial, target)
        except BaseException:
            # Closing writes the rest of the buffer, which fails again on a full disk.
            with contextlib.suppress(OSError):
                stream.close()
            partial.unlink(missing_ok=True)
            raise
        stream.close()
        _sync_folder(target.parent)
    except OSError as error:
        raise _explain_write_error(target, error) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises a ``UserError`` if a file cannot be written. Does not create files or folders.

    Used before a long computation whose result will be written to ``path``.
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
        with contextlib.suppress(FileNotFoundError):  # a name that is too long raises another error
            os.stat(ancestor / _name_partial(target).name)
    except OSError as error:
        raise _explain_write_error(target, error) from error


def check_output(output: Path, suffix: str, *, overwrite: bool) -> None:
    """Raises a ``UserError`` if ``output`` has another suffix, exists or cannot be written."""
    if output.suffix.lower() != suffix:
        raise UserError(f"--output '{output}' must end in {suffix}")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: choose another name, or pass --overwrite")
    check_writable(output)


def replace_folders(*paths: str | os.PathLike[str]) -> None:
    """Creates folders. Deletes existing ones, if this function has created them before.

    A hidden file marks the folders that this function has created. Raises a ``UserError``, before
    any folder is deleted, if a folder has files but not this mark. Also raises a ``UserError`` if a
    folder cannot be written.
    """
    for folder in map(Path, paths):
        has_files = folder.is_dir() and any(folder.iterdir())
        if has_files and not (folder / _MARK).exists():
            raise UserError(f"'{folder}' has files that would be replaced: choose another --output")
    for folder in map(Path, paths):
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(folder / _MARK, b"")


def is_output_folder(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder is that of a run, or was created by ``replace_folders``."""
    path = Path(folder)
    return (path / _MARK).exists() or all((path / name).is_file() for name in _FILES_OF_RUN)


@contextlib.contextmanager
def refuse_second_command(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Context for a command that replaces subfolders of its output folder.

    Raises a ``UserError`` if another process is in this context for the same folder, or if the
    folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            is_first = stack.enter_context(try_file_lock(Path(folder) / ".command.lock"))
        except OSError as error:
            raise _explain_write_error(Path(folder), error) from error
        if not is_first:
            raise UserError(
                f"'{folder}' is in use by a command that has not ended: wait for it, or choose "
                "another --output"
            )
        yield


def _explain_write_error(target: Path, error: OSError) -> UserError:
    """Converts an error of writing ``target`` to a ``UserError`` with advice."""
    reason = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    return UserError(f"cannot write '{target}': {reason} (an existing file is unchanged)")


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Removes files that killed processes have left incomplete. Files in work are kept."""
    for partial in Path(folder).glob(f".*{_PARTIAL_SUFFIX}"):
        # An OSError means that a process is writing the file, or that it cannot be removed.
        with contextlib.suppress(OSError), open(partial, "r+b") as stream:
            _lock(stream)
            partial.unlink()


class _Stream(io.BufferedWriter):
    """A buffered file that stores the error of a failed write.

    ``torch.save`` hides this error, for example that the disk is full, behind one of its own.

    Attributes:
        write_error: the error of the last write that failed; None if none did.
    """

    write_error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.write_error = error
            raise


def _name_partial(target: Path) -> Path:
    """Returns a new name of a hidden file next to the target."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{_PARTIAL_SUFFIX}")


def _open_partial(target: Path) -> tuple[Path, _Stream]:
    """Creates a hidden file next to the target. Returns its path and the open file.

    The file is locked, so that ``remove_leftovers`` of another process does not remove it.
    """
    while True:
        partial = _name_partial(target)
        stream = _Stream(io.FileIO(partial, "xb"))
        try:
            _lock(stream)
        except BlockingIOError:  # another process is removing it
            stream.close()
            continue
        except OSError:  # the file system has no locks
            pass
        if partial.exists():
            return partial, stream
        stream.close()  # another process has removed the file before it was locked


def _write_to_disk(stream: _Stream, write: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes the content and flushes it to the disk. Raises the original error if this fails."""
    try:
        if isinstance(write, bytes):
            stream.write(write)
        else:
            write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    except Exception:
        if stream.write_error is not None:
            raise stream.write_error from None
        raise


def _lock(stream: BinaryIO) -> None:
    """Locks a file. Raises a ``BlockingIOError`` if another process has locked it."""
    if sys.platform != "win32":
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Flushes a folder to the disk, so that a renamed file keeps its new name after a crash."""
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str], waiting: str = "") -> Iterator[None]:
    """Context in which only one process can be at a time. Others wait.

    The system releases the lock if the process is killed.

    Args:
        path: file that is used only for the lock. It is created, and not removed.
        waiting: message that is logged if this process has to wait; "" for none.
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


@contextlib.contextmanager
def try_file_lock(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Context that holds a lock, unless another process has it. Yields whether this process has it.

    Unlike ``file_lock``, never waits. The system releases the lock if the process is killed, and
    child processes do not inherit it. On a file system without locks, every process has the lock.

    Args:
        path: file that is used only for the lock, in an existing folder. It is removed at the end.
    """
    stream = _open_locked(path)
    if stream is None:
        yield False
        return
    try:
        yield True
    finally:
        Path(path).unlink(missing_ok=True)
        stream.close()


def _open_locked(path: str | os.PathLike[str]) -> BinaryIO | None:
    """Opens and locks a file, which is created. Returns None if another process has the lock."""
    while True:
        stream = open(path, "ab")  # noqa: SIM115  the caller closes it
        if sys.platform == "win32":
            return stream
        try:
            # With flock, the workers of a killed process would keep the lock for a while.
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            stream.close()
            return None
        except OSError:  # the file system has no locks
            return stream
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
                return stream
        stream.close()  # the process that had the lock has removed the file meanwhile


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
    """Returns the SHA-256 of the names, dtypes, shapes and values of tensors, in hexadecimal.

    The devices of the tensors and their order in the mapping do not matter.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
        digest.update(array.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parse_record(kind: Any, value: Any, where: str) -> Any:
    """Converts a JSON value to a type, and checks it.

    Integers must not be negative, and floats must be finite.

    Args:
        kind: the type: a dataclass, a tuple type, a ``Literal``, ``X | None``, or a plain type.
        value: the value from a JSON file.
        where: location of the value, for messages.

    Raises:
        UserError: a field is unknown, missing or of the wrong type. The message names the field.
    """
    arguments = get_args(kind)
    origin = get_origin(kind)
    expected = getattr(kind, "__name__", kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _parse_dataclass(kind, value, where)
    if origin is UnionType:  # X | None
        if value is None:
            return None
        return parse_record(arguments[0], value, where)
    if origin is tuple:  # tuple[X, ...] or tuple[X, X]
        has_any_length = ... in arguments
        is_list = isinstance(value, list | tuple)
        if is_list and (has_any_length or len(value) == len(arguments)):
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
    """Converts a JSON object to the dataclass ``kind``."""
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
    """Returns whether a value is a valid str, bool, int or float.

    Floats must be finite, and integers must not be negative.
    """
    if kind is float:  # the comparison is false for nan; integers in JSON have no upper bound
        return type(value) in (int, float) and abs(value) < 1e300
    if kind is int:
        return type(value) is int and value >= 0
    return type(value) is kind
