# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files that a reader finds whole: the new one, or what was there before."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from qbheat_det.errors import UserError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a name in the same folder to write to; leaving the block puts it in place of ``path``.

    Where the block fails, or the process is killed in it, ``path`` stays as it was.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise UserError(f"cannot write '{target}': {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
