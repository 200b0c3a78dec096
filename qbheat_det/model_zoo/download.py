# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files over HTTP: what was cut off goes on, and only what has the right hash takes the name."""

import hashlib
import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError

logger = logging.getLogger(__name__)
_ATTEMPTS = 4
_TIMEOUT = 30.0  # seconds without one byte
_PAUSE = 0.5  # seconds, more with each attempt
_CHUNK = 1 << 20
_NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class NotFetched(Exception):
    """Why one place does not give a file; another one may."""


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def check_hash(path: Path, sha256: str, way_out: str) -> None:
    """
    Raises:
        UserError: the file is another one than the index means, or cannot be read.
    """
    try:
        found = hash_file(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}") from error
    if found != sha256:
        raise UserError(refuse_hash(str(path), found, sha256, way_out))


def refuse_hash(where: str, found: str, expected: str, way_out: str) -> str:
    """Returns the sentence that refuses a file for its hash."""
    return (
        f"'{where}' is refused, it is not the file that the index means: its SHA-256 begins with "
        f"{found[:12]}, that of the index with {expected[:12]}; {way_out}"
    )


def download(url: str, target: Path, *, sha256: str, size: int) -> None:
    """Fetches a file whose content is known beforehand; shows progress on a terminal.

    What was cut off stays beside the target, and the next call goes on from there if the server
    still has the same file and can send parts.

    Args:
        url: http or https.
        target: the file; its folder exists, and no other process fetches it now.
        sha256: of the whole file.
        size: of the whole file, in bytes.

    Raises:
        NotFetched: the server cannot be reached, lacks the file, or cuts it off again and again.
        UserError: it sent another file, of which nothing is kept.
    """
    partial = _Partial(target, url)
    for attempt in range(_ATTEMPTS):
        try:
            found, is_resumed = _transfer(partial, size)
        except _NETWORK_ERRORS as error:
            code = error.code if isinstance(error, urllib.error.HTTPError) else 500
            if code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.remove()
            elif code < 500 or attempt == _ATTEMPTS - 1:
                raise NotFetched(f"{url}: {_describe(error)}") from error
            logger.info("%s: %s; trying again", url, _describe(error))
            time.sleep(_PAUSE * (attempt + 1))
        else:
            if found == sha256:
                os.replace(partial.path, target)
                partial.remove()
                return
            partial.remove()
            if not is_resumed:  # else the beginning may have been of an older file
                raise UserError(
                    refuse_hash(url, found, sha256, "nothing of it was kept; tell who runs it")
                )
    raise NotFetched(f"{url}: {_ATTEMPTS} attempts did not bring the whole file")


def _describe(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.reason}"
    return str(getattr(error, "reason", None) or error or type(error).__name__)


class _Partial:
    """What has arrived of a file, and from which version of it."""

    def __init__(self, target: Path, url: str) -> None:
        self.path = target.with_name(f".{target.name}.partial")
        self._note = target.with_name(f".{target.name}.partial.json")
        self.url = url

    @property
    def start(self) -> int:
        """Bytes that are here and can be gone on from."""
        return self.path.stat().st_size if self.validator and self.path.is_file() else 0

    @property
    def validator(self) -> str:
        """What the server calls the version that the bytes are of; empty if unknown."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return str(note["validator"]) if note["url"] == self.url else ""
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def begin(self, validator: str) -> None:
        """Forgets what has arrived; bytes of this version follow."""
        self.remove()
        self._note.write_text(
            json.dumps({"url": self.url, "validator": validator}), encoding="utf-8"
        )

    def remove(self) -> None:
        for path in (self.path, self._note):
            path.unlink(missing_ok=True)


def _transfer(partial: _Partial, size: int) -> tuple[str, bool]:
    """Brings the partial file to its end; returns its SHA-256 and whether it had a beginning."""
    start = partial.start
    if start >= size:  # killed before it took its name
        return hash_file(partial.path), True
    headers = {"User-Agent": "qbheat_det", "Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": partial.validator}
    request = urllib.request.Request(partial.url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        is_resumed = _goes_on(response, start)
        if not is_resumed:
            partial.begin(_validator_of(response))
            start = 0
        length = response.headers.get("Content-Length", "")
        end = start + int(length) if length.isdecimal() else size
        _append(response, partial.path, start=start, limit=size)
    arrived = partial.path.stat().st_size
    if arrived > size:
        partial.remove()
        raise UserError(
            f"'{partial.url}' is refused, it is not the file that the index means: it is longer "
            f"than the {size} bytes of that; nothing of it was kept, tell who runs it"
        )
    if arrived < end:
        raise ConnectionError(f"cut off after {arrived} of {end} bytes")
    return hash_file(partial.path), is_resumed


def _append(response: Any, path: Path, *, start: int, limit: int) -> None:
    """Writes what the server sends behind what is there, to one byte beyond the limit at most."""
    with (
        open(path, "ab") as stream,
        tqdm(
            total=limit,
            initial=start,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            desc=path.name.removeprefix(".").removesuffix(".partial"),
            disable=None,  # where nobody looks, as in a log file
        ) as bar,
    ):
        # A file that does not end would fill the disk; one byte too many tells it is another.
        left = limit - start + 1
        while left and (chunk := response.read(min(_CHUNK, left))):
            stream.write(chunk)
            left -= len(chunk)
            bar.update(len(chunk))
        stream.flush()
        os.fsync(stream.fileno())


def _goes_on(response: Any, start: int) -> bool:
    """Whether a response is the rest from ``start``, and not the whole file."""
    told = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if response.status != http.client.PARTIAL_CONTENT:
        return False
    if not told or int(told[1]) != start:
        raise ConnectionError("the server sent another part than was asked for")
    return True


def _validator_of(response: Any) -> str:
    etag = str(response.headers.get("ETag", ""))
    # A weak one stands for files that mean the same; bytes of two such do not fit together.
    return etag if etag.startswith('"') else str(response.headers.get("Last-Modified", ""))
