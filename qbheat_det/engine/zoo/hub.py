# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Entries to and from a repository of the Hugging Face hub.

A repository holds files of weights by the names of the index, an ``index.json`` of the same kind as
the package's, and a model card made of it.
"""

import fnmatch
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import index
from qbheat_det.model_zoo.download import NotFetched, hash_file
from qbheat_det.model_zoo.index import ZooEntry, load_index, save_index
from qbheat_det.model_zoo.places import fetch, from_hub, locked

from .model_card import render_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
_CARD = "README.md"
MAX_INDEX = 50_000_000
"""Bytes of a repository's index; an entry has some 5,000."""


def push_entries(
    entries: Sequence[ZooEntry], repository: str, *, private: bool = False, message: str = ""
) -> str:
    """Uploads weights with their index and a model card, as one commit.

    What the repository held before stays, in its index and its card too. Who may write there is
    the business of the hub's own client: ``hf auth login``, or ``$HF_TOKEN``.

    Args:
        entries: of the index, one at least; their files are fetched and their hashes checked.
        repository: OWNER/NAME; made where it is missing.
        private: whether a new repository is for its owner alone.
        message: of the commit; names the entries by default.

    Returns:
        The address of the commit.

    Raises:
        UserError: a file cannot be fetched, or the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # takes a second

    files = {entry.file: fetch(entry) for entry in entries}
    api = HfApi(endpoint=_endpoint())
    with tempfile.TemporaryDirectory() as folder:
        _ask(repository, lambda: api.create_repo(repository, private=private, exist_ok=True))
        there = _entries_there(api, repository, Path(folder))
        merged = {entry.name: entry for entry in (*there, *entries)}
        own_index = Path(folder) / "merged.json"
        save_index(merged.values(), own_index)
        card = render_card([merged[name] for name in sorted(merged)], repository)
        operations = [
            CommitOperationAdd(_CARD, card.encode()),
            CommitOperationAdd(index.INDEX_FILE.name, own_index.read_bytes()),
            *[CommitOperationAdd(name, str(path)) for name, path in files.items()],
        ]
        commit = _ask(
            repository,
            lambda: api.create_commit(
                repository,
                operations,
                commit_message=message or f"Add {', '.join(entry.name for entry in entries)}",
            ),
        )
    return str(commit.commit_url)


def pull_entries(repository: str, folder: Path, pattern: str = "*") -> list[Path]:
    """Brings entries of a repository, with their index, into a folder for ``$QBHEAT_ZOO``.

    Args:
        repository: OWNER/NAME, or OWNER/NAME@REVISION.
        folder: of one's own. Entries that its index has already stay, unless the repository has
            others by the same names.
        pattern: of names, as of a shell.

    Returns:
        The paths of the files, each with the hash of the repository's index.

    Raises:
        UserError: the hub does not give what was asked for, or something in it is not sound.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as scratch:
        there = _entries_there(HfApi(endpoint=_endpoint()), repository, Path(scratch))
    entries = [entry for entry in there if fnmatch.fnmatchcase(entry.name, pattern)]
    if not entries:
        names = ", ".join(entry.name for entry in there) or f"no {index.INDEX_FILE.name} at all"
        raise UserError(f"'{repository}' has nothing that matches '{pattern}', but {names}")
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / index.INDEX_FILE.name
    before = load_index(own) if own.is_file() else ()
    for entry in entries:
        _bring(repository, entry, folder / entry.file)
    save_index({entry.name: entry for entry in (*before, *entries)}.values(), own)
    return [folder / entry.file for entry in entries]


def _bring(repository: str, entry: ZooEntry, target: Path) -> None:
    if target.is_file() and hash_file(target) == entry.sha256:
        return
    try:
        with locked(target):
            from_hub(repository, entry, target)
    except NotFetched as reason:
        raise UserError(f"'{entry.name}' cannot be fetched: {reason}") from reason


def _entries_there(api: "HfApi", repository: str, folder: Path) -> tuple[ZooEntry, ...]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    name, _, revision = repository.partition("@")
    where: dict[str, Any] = {"revision": revision or None}
    known = index.INDEX_FILE.name
    if not _ask(repository, lambda: api.file_exists(name, known, **where)):
        return ()
    url = hf_hub_url(name, known, endpoint=_endpoint(), **where)
    size = _ask(repository, lambda: get_hf_file_metadata(url).size)
    if size is not None and size > MAX_INDEX:
        raise UserError(
            f"the {known} of '{repository}' is refused: it has {size / 1e6:.1f} MB, and an index "
            f"{MAX_INDEX / 1e6:.0f} MB at most"
        )
    path = _ask(
        repository, lambda: api.hf_hub_download(name, known, local_dir=str(folder), **where)
    )
    return load_index(path)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None  # the client reads it when it is imported


def _ask(repository: str, request: Callable[[], T]) -> T:
    """
    Raises:
        UserError: the request failed.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return request()
    except UserError:
        raise
    except Exception as error:  # of the hub, of the network below it, of names
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = " ".join(str(error).split())[:300]
        advice = (
            "; log in with 'hf auth login', or set $HF_TOKEN to a token that may write there"
            if isinstance(error, HfHubHTTPError) and status in (401, 403)
            else ""
        )
        raise UserError(f"the hub refuses '{repository}': {reason}{advice}") from error
