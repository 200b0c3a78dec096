# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the weights of an entry come from, in this order.

1. The folders that ``$QBHEAT_ZOO`` names (several as in ``$PATH``);
2. what is shipped with the package, ``qbheat_det/model_zoo/weights``;
3. what was fetched before, below Detectron2's cache (``$FVCORE_CACHE``); where that cannot be
   written it is read all the same, and what is fetched goes to a folder of one's own below that of
   temporary files;
4. the address ``$QBHEAT_ZOO_URL``, to which the file name is appended;
5. the repositories of the Hugging Face hub that ``$QBHEAT_ZOO_HUB`` names, ``OWNER/NAME`` or
   ``OWNER/NAME@REVISION``, separated by commas (``$HF_ENDPOINT`` for another hub).

A file is used only if it has the SHA-256 of the index: one of the same name and another content
is refused, not passed over. What is fetched is kept in the cache, and fetched once even if several
processes ask at the same time.
"""

import errno
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable

from .download import NotFetched, check_hash, download
from .index import ZooEntry, zoo_folders

logger = logging.getLogger(__name__)
SHIPPED = Path(__file__).with_name("weights")
_ANEW = "copy or fetch it anew, or take it away"


def cache_folder(entry: ZooEntry) -> Path:
    """Returns the folder of the cache that is for this content; it need not exist."""
    said = _said_cache(entry)
    if _is_writable(said.parents[1]):
        return said
    # In its stead iopath takes a folder of all users; this one is of one of them.
    return _stand_in() / said.parent.name / said.name


def check_own_cache(target: Path) -> None:
    """Makes the folder of a file in the cache.

    Raises:
        UserError: it cannot be made, or below the folder of temporary files, where all users may
            write, another user has made it.
    """
    check_writable(target)
    root = target.parents[2]
    if root == _stand_in():
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != _user():
            raise UserError(
                f"'{root}' was not made by you: let $FVCORE_CACHE name a folder of your own"
            )
    target.parent.mkdir(parents=True, exist_ok=True)


def _stand_in() -> Path:
    return Path(tempfile.gettempdir()) / f"iopath_cache_{_user()}"


def _user() -> int:
    return os.getuid() if sys.platform != "win32" else 0  # where each has temporary files apart


def _is_writable(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False


def _said_cache(entry: ZooEntry) -> Path:
    root = Path(os.environ.get("FVCORE_CACHE") or "~/.torch/iopath_cache").expanduser()
    # By content: two versions of the package may mean two files by one name.
    return root / "qbheat_zoo" / entry.sha256[:12]


def fetch(entry: ZooEntry) -> Path:
    """Returns the file of an entry on this machine, its hash checked; fetches it if need be.

    Raises:
        UserError: a place holds another file under this name, or no place gives it: the sentence
            says which file to put where.
    """
    found = find_here(entry)
    if found is not None:
        check_hash(found, entry.sha256, _ANEW)
        return found
    remotes = list(_remotes(entry))
    if not remotes:
        raise UserError(
            f"the weights of '{entry.name}' are not on this machine, and neither $QBHEAT_ZOO_URL "
            f"nor $QBHEAT_ZOO_HUB says where to fetch them: {_what_to_put_where(entry)}"
        )
    target = cache_folder(entry) / entry.file
    check_own_cache(target)
    with locked(target):
        if target.is_file():  # by a process that was faster
            check_hash(target, entry.sha256, _ANEW)
            return target
        reasons = []
        for bring in remotes:
            try:
                bring(target)
            except NotFetched as reason:
                reasons.append(str(reason))
            else:
                logger.info("Fetched '%s' to '%s'", entry.name, target)
                return target
    raise UserError(
        f"the weights of '{entry.name}' cannot be fetched ({'; '.join(reasons)}): where there is "
        f"no network, {_what_to_put_where(entry)}"
    )


def find_here(entry: ZooEntry) -> Path | None:
    """Returns the first file of that name on this machine, whatever is in it; None if none is.

    Raises:
        UserError: ``$QBHEAT_ZOO`` names what is no folder.
    """
    folders = (*zoo_folders(), SHIPPED, *_caches(entry))
    return next(
        (folder / entry.file for folder in folders if (folder / entry.file).is_file()), None
    )


def describe_place(entry: ZooEntry) -> str:
    """Returns in words where ``fetch`` would take the file from; nothing is fetched or read.

    Raises:
        UserError: a variable of the environment is not sound.
    """
    found = find_here(entry)
    if found is not None and found.parent == SHIPPED:
        return "shipped"
    if found is not None and found.parent in _caches(entry):
        return "fetched before"
    if found is not None:
        return str(found.parent)
    return _base_url() or next((f"hub: {repo}" for repo in _hub_repositories()), "nowhere")


def _caches(entry: ZooEntry) -> tuple[Path, ...]:
    """The cache, which may be filled and read-only, and what stands in its stead then."""
    return tuple(dict.fromkeys([_said_cache(entry), cache_folder(entry)]))


def _what_to_put_where(entry: ZooEntry) -> str:
    return (
        f"put the file '{entry.file}' ({entry.size / 2**20:.1f} MiB, its SHA-256 begins with "
        f"{entry.sha256[:12]}) into the folder '{cache_folder(entry)}', or into one that "
        "$QBHEAT_ZOO names"
    )


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds a file's lock, so that one process at a time fetches it."""
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        logger.info("Waiting for another process that is fetching '%s'", target.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remotes(entry: ZooEntry) -> Iterator[Callable[[Path], None]]:
    base = _base_url()
    if base:
        url = f"{base}/{entry.file}"
        yield lambda target: download(url, target, sha256=entry.sha256, size=entry.size)
    for repository in _hub_repositories():
        yield lambda target, repository=repository: from_hub(  # type: ignore[misc]
            repository, entry, target
        )


def _base_url() -> str:
    base = os.environ.get("QBHEAT_ZOO_URL", "").strip().rstrip("/")
    is_address = base.startswith(("http://", "https://")) and base.isprintable()
    if base and (not is_address or " " in base):
        raise UserError(
            f"$QBHEAT_ZOO_URL is '{base}', but must begin with http:// or https:// and hold no "
            "blank; folders are named by $QBHEAT_ZOO"
        )
    return base


def _hub_repositories() -> list[str]:
    names = os.environ.get("QBHEAT_ZOO_HUB", "").split(",")
    return [name.strip() for name in names if name.strip()]


def _check_size(repository: str, revision: str, entry: ZooEntry) -> None:
    """
    Raises:
        UserError: the hub has a file of another size, which might fill the disk.
    """
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT") or None
    where: dict[str, Any] = {"revision": revision or None, "endpoint": endpoint}
    url = huggingface_hub.hf_hub_url(repository, entry.file, **where)
    size = huggingface_hub.get_hf_file_metadata(url).size
    if size is not None and size != entry.size:
        raise UserError(
            f"'{entry.file}' of the hub's {repository} is refused, it is not the file that the "
            f"index means: it has {size} bytes, and not {entry.size}; nothing of it was fetched"
        )


def from_hub(repository: str, entry: ZooEntry, target: Path) -> None:
    """Fetches an entry from the Hugging Face hub.

    Args:
        repository: OWNER/NAME, or OWNER/NAME@REVISION.
        entry: of the index.
        target: the file; its folder exists, and no other process fetches it now.

    Raises:
        NotFetched: the hub cannot be reached, or lacks the repository or the file.
        UserError: it has another file of that name, of which nothing is kept.
    """
    import huggingface_hub  # takes a second, and most weights come from elsewhere

    name, _, revision = repository.partition("@")
    folder = target.with_name(f".{target.name}.hub")
    try:
        _check_size(name, revision, entry)
        path = huggingface_hub.hf_hub_download(
            name,
            entry.file,
            revision=revision or None,
            local_dir=folder,
            # Its own default was settled when it was imported, by timm.
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    except UserError:
        raise
    except Exception as error:  # of the hub, of the network below it, of the names
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = " ".join(str(error).split())[:200]
        raise NotFetched(f"hub {repository}: {reason or type(error).__name__}") from error
    try:
        check_hash(Path(path), entry.sha256, f"nothing of it was kept; tell who runs {repository}")
        os.replace(path, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
