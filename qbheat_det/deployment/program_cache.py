# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compiled programs on the disk, for the processes to come.

They hold machine code, so their folder is the user's alone: one in which others can write is
refused. An entry is a description that names a package by its digest, or says why there is none;
it is written last, so that an entry is there whole or not at all.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iopath.common.file_io import file_lock

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data.datasets.toy import get_cache_dir, make_cache_folder

_MOST_BYTES = 4 * 2**30  # of all packages; the ones that were not used for longest go
_LONGEST_BUILD = 24 * 3600  # seconds; older leftovers are of processes that were killed
_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"

# Where the compiler puts its files is a setting of the whole process.
_BUILDING = threading.Lock()


@dataclass(frozen=True)
class Entry:
    """What is known of a key: its package, None where there had better be none, and notes."""

    package: Path | None
    notes: dict[str, Any]


class ProgramCache:
    """A folder of packages, "programs" in the package's cache folder unless one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        """
        Args:
            folder: of the programs; made, for the user alone, where it is missing.

        Raises:
            UserError: it cannot be made, or others than the user can change what is in it.
        """
        self.folder = (folder or get_cache_dir() / "programs").expanduser().absolute()
        try:
            make_cache_folder(self.folder.parent)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the folder of compiled programs '{self.folder}' cannot be made "
                f"({error.strerror or error}): set QBHEAT_CACHE to one that can be written"
            ) from error
        refuse_what_others_can_write(self.folder)

    def get(self, key: str, description: dict[str, Any]) -> Entry | None:
        """Returns the entry of a key; None if there is none, or not the whole of it.

        Args:
            key: hexadecimal.
            description: what the key is made of; an entry with another one is none.
        """
        try:
            entry = json.loads(self._entry(key).read_text(encoding="utf-8"))
            digest, notes = entry["sha256"], dict(entry["notes"])
            if entry["description"] != description:
                return None
            if digest is None:
                return Entry(None, notes)
            path = self._package(key, digest)
            if _digest(path) != digest:
                return None
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Entry(path, notes)

    def put(
        self,
        key: str,
        description: dict[str, Any],
        build: Callable[[Path], dict[str, Any]],
    ) -> None:
        """Makes an entry; one thread of the process at a time.

        Args:
            key: hexadecimal.
            description: what the key is made of.
            build: writes the package to the path that it is given, or nothing where there had
                better be none, and returns the entry's notes.
        """
        self.drop(key)
        path = digest = None
        with _BUILDING, self._workplace() as folder:
            fresh = folder / "program.pt2"
            notes = build(fresh)
            if fresh.exists():
                digest = _digest(fresh)
                path = self._package(key, digest)
                os.replace(fresh, path)
        entry = {"sha256": digest, "notes": notes, "description": description}
        content = json.dumps(entry).encode()
        write_atomically(self._entry(key), lambda stream: stream.write(content))
        if path is not None:
            self._make_room(keep=path)

    def drop(self, key: str) -> None:
        """Removes an entry."""
        for path in self.folder.glob(f"{key}*"):
            if path.suffix in (".json", ".pt2"):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Keeps other processes from building the same entry: they wait, and find it."""
        with file_lock(str(self.folder / key)):
            yield

    @contextlib.contextmanager
    def _workplace(self) -> Iterator[Path]:
        """Gives a folder below this one, also for what the compiler leaves, and removes it."""
        folder = Path(tempfile.mkdtemp(prefix="making-", dir=self.folder))
        before = os.environ.get(_INDUCTOR_FOLDER)
        os.environ[_INDUCTOR_FOLDER] = str(folder / "inductor")
        _forget_header()
        try:
            yield folder
        finally:
            _forget_header()
            if before is None:
                del os.environ[_INDUCTOR_FOLDER]
            else:
                os.environ[_INDUCTOR_FOLDER] = before
            shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self, keep: Path) -> None:
        for path, status in _list(self.folder, "making-*"):
            if status.st_mtime < time.time() - _LONGEST_BUILD:
                shutil.rmtree(path, ignore_errors=True)
        packages = sorted(_list(self.folder, "*.pt2"), key=lambda pair: pair[1].st_mtime)
        total = sum(status.st_size for _, status in packages)
        for path, status in packages:
            if total > _MOST_BYTES and path != keep:
                total -= status.st_size
                self.drop(path.name.partition("-")[0])

    def _package(self, key: str, digest: str) -> Path:
        return self.folder / f"{key}-{digest[:16]}.pt2"

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def refuse_what_others_can_write(folder: Path) -> None:
    """Checks a folder of machine code and the folders above it.

    Raises:
        UserError: the folder is another user's or not this user's alone to write, or a folder above
            it lets others put another one in its place.
    """
    if not hasattr(os, "geteuid"):  # rights are kept otherwise there
        return
    user = os.geteuid()
    folder = folder.resolve()
    for path in (folder, *folder.parents):
        status = path.stat()
        others = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and not _is_of_one(status.st_gid, user)
        )
        theirs = status.st_uid not in ({user} if path == folder else {user, 0})
        sticky = path != folder and status.st_mode & stat.S_ISVTX
        if theirs or (others and not sticky):
            raise UserError(
                f"compiled programs are run, and others than you can change '{path}': take that "
                "right away (chmod go-w), or set QBHEAT_CACHE to a folder that is yours alone"
            )


def _is_of_one(group: int, user: int) -> bool:
    """Whether a group is a user's own, by his name, as systems make it that let groups write."""
    import grp  # not on Windows
    import pwd

    try:
        name, found = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return group != 0 and found.gr_name == name and not set(found.gr_mem) - {name}


def _list(folder: Path, pattern: str) -> list[tuple[Path, os.stat_result]]:
    """Returns what is there and stays long enough to be looked at: other processes remove, too."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def _forget_header() -> None:
    """Has the compiler write its header anew.

    torch 2.6 includes one in all of its code by the path where it wrote it first: not below the
    folder of another build, which is gone.
    """
    from torch._inductor import codecache

    path_of_header = getattr(codecache, "cpp_prefix_path", None)  # later ones have it in the wheel
    if path_of_header is not None:
        path_of_header.cache_clear()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
