# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Downloads files into a cache of limited size that all processes of a machine share.

Buckets (``s3://``, ``gs://``, ``az://``) need the package obstore, which reads credentials from the
environment. The threads of obstore do not survive the fork of data loader workers, so each download
from a bucket runs in a new process.
"""

import hashlib
import http.client
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import file_lock, get_cache_dir
from qbheat_det.core.text import format_bytes, format_duration, one_line

logger = logging.getLogger(__name__)

# The limits are environment variables, so that forked and spawned workers inherit them.
_GB, _SECONDS = "QBHEAT_SHARDS_CACHE_GB", "QBHEAT_SHARDS_RETRY_SECONDS"
_ADDRESS = re.compile(r"(https?|s3|gs|az)://.")
_STALLED = 30.0  # seconds without data until a download restarts
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0  # seconds between attempts
_BLOCK = 1 << 20
_GONE = {400, 401, 403, 404, 405, 410}  # HTTP errors that are not retried
_REFUSED = 3  # exit code of ``_FROM_BUCKET`` for errors that are not retried
_FROM_BUCKET = """
import os, sys
import obstore
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
address, target, stalled = sys.argv[1:]
folder, _, name = address.rpartition("/")
plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
options = {"connect_timeout": stalled, "read_timeout": stalled, "timeout": "1 day"}
try:
    store = obstore.store.from_url(
        folder, client_options={**options, "allow_http": plain}, retry_config={"max_retries": 0}
    )
    answer = obstore.get(store, name)
    with open(target, "r+b") as file:
        for block in answer.stream():
            file.write(block)
        file.truncate()
    sys.exit(0 if os.path.getsize(target) == answer.meta["size"] else "the answer was cut short")
except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError) as error:
    print(str(error).splitlines()[0], file=sys.stderr)
    sys.exit(3)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {str(error).splitlines()[0]}")
"""


class _Refused(OSError):
    """An error that is not retried."""


def is_address(path: object) -> bool:
    """Returns whether a path is a URL of a web server or a bucket."""
    return bool(_ADDRESS.match(str(path)))


def configure_cache(*, gigabytes: float, retry_seconds: float) -> None:
    """Sets the limits of the cache for this process and its child processes.

    Args:
        gigabytes: largest total size of the downloaded files on this machine, in 1e9 bytes.
        retry_seconds: time in which the download of a file is retried before the run fails.

    Raises:
        UserError: a limit is not positive.
    """
    for key, value in (("CACHE_GB", gigabytes), ("RETRY_SECONDS", retry_seconds)):
        if not value > 0:
            raise UserError(f"DATALOADER.{key} must be above 0, but is {value}")
    os.environ[_GB], os.environ[_SECONDS] = str(gigabytes), str(retry_seconds)


def cache_limit() -> float:
    """Returns the largest total size of the downloaded files, in bytes."""
    return 1e9 * float(os.environ.get(_GB, 20))


def cache_folder() -> Path:
    """Returns the folder of the downloaded files."""
    return get_cache_dir() / "shards"


def fetch(address: str, num_bytes: int) -> Path:
    """Returns the path of a local copy of a file, which is downloaded if needed.

    Another process may remove the copy at any time. Raises a ``UserError`` if the download takes
    too long, or the size of the file is not ``num_bytes``.
    """
    folder, _, name = address.rpartition("/")
    own = cache_folder() / hashlib.sha256(folder.encode()).hexdigest()[:16]
    target = own / f"{num_bytes}-{name}"
    if not target.is_file():
        with file_lock(own / f".{name}.lock"):
            if not target.is_file():  # another process may have downloaded it
                partial = own / f"{name}.part"
                _reserve(partial, num_bytes)
                try:
                    download(address, partial, num_bytes)
                    os.replace(partial, target)
                finally:
                    partial.unlink(missing_ok=True)
    return target


def _reserve(partial: Path, num_bytes: int) -> None:
    """Creates a file of the final size, and removes least recently used files to make room."""
    root = cache_folder()
    with file_lock(root / ".lock"):
        files = []
        for path in root.glob("*/*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if not path.name.endswith(".lock"):
                files.append((found.st_mtime, found.st_size, path))
        room = cache_limit() - num_bytes - sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if room >= 0:
                break
            path.unlink(missing_ok=True)
            room += size
        if room < 0:
            raise UserError(
                f"a file of {format_bytes(num_bytes)} does not fit into the cache of "
                f"{format_bytes(cache_limit())}: raise DATALOADER.CACHE_GB"
            )
        with open(partial, "wb") as file:
            file.truncate(num_bytes)


def download(address: str, target: Path, num_bytes: int | None = None) -> None:
    """Downloads into an existing file, and retries with increasing pauses.

    ``num_bytes`` is the expected size; None accepts any size.

    Raises:
        UserError: the download failed for ``DATALOADER.RETRY_SECONDS``, or the file is missing,
            forbidden or of an unexpected size.
    """
    patience, pause, is_told = float(os.environ.get(_SECONDS, 300)), _FIRST_PAUSE, False
    end = time.monotonic() + patience
    while True:
        try:
            _transfer(address, target, min(_STALLED, max(0.5, end - time.monotonic())))
            break
        except _Refused as error:
            raise UserError(f"'{address}' cannot be read: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() + pause > end:
                raise UserError(
                    f"'{address}' could not be read for {format_duration(patience)} "
                    f"(DATALOADER.RETRY_SECONDS): {one_line(error)}. Continue the run later with "
                    "--resume"
                ) from error
            if not is_told:
                logger.warning(f"Waiting for '{address}': {one_line(error)}")
            is_told = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    if is_told:
        logger.warning(f"'{address}' answers again")
    found = target.stat().st_size
    if num_bytes is not None and found != num_bytes:
        raise UserError(
            f"'{address}' has {found:,} bytes, but its index says {num_bytes:,}: the shard is "
            "truncated, or was changed after it was packed"
        )


def _transfer(address: str, target: Path, stalled: float) -> None:
    if address.startswith("http"):
        try:
            with (
                urllib.request.urlopen(address, timeout=stalled) as answer,
                target.open("r+b") as to,
            ):
                shutil.copyfileobj(answer, to, _BLOCK)
                copied, length = to.truncate(), answer.headers.get("Content-Length")
        except urllib.error.HTTPError as error:
            kind = _Refused if error.code in _GONE else OSError
            raise kind(f"HTTP {error.code} {error.reason}") from error
        if length is not None and copied != int(length):
            raise OSError(f"the answer ended after {copied:,} of {int(length):,} bytes")
        return
    arguments = [sys.executable, "-c", _FROM_BUCKET, address, str(target), f"{stalled:.1f} s"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    if "No module named 'obstore'" in reason:
        raise _Refused("buckets need the extra 'shards': pip install obstore")
    if done.returncode:
        raise (_Refused if done.returncode == _REFUSED else OSError)(reason)
