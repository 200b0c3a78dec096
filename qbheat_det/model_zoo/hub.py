# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Uploads entries to a repository of the Hugging Face hub, and downloads them from one.

A repository holds files of weights, an ``index.json`` as the package has it, and a model card.
"""

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from qbheat_det.core.errors import UserError

from . import index
from .index import ZooEntry, load_index, render_index, save_index
from .sources import UnavailableError, download_from_hub, fetch
from .table import describe_entry

# The hub's names of tasks.
_PIPELINES = {
    "pretraining": "image-feature-extraction",
    "detection": "object-detection",
    "classification": "image-classification",
}
_TAGS = ["qbheat_det", "detectron2", "mobile-former"]
_USAGE = """\
## Usage

With [Detectron2](https://github.com/facebookresearch/detectron2) and `qbheat_det` installed:

```sh
python tools/zoo.py pull --repo {repository} --output my_zoo
QBHEAT_ZOO=my_zoo python tools/zoo.py verify '{name}'
```

```python
import qbheat_det.model_zoo as zoo

model = zoo.get("{name}")  # an nn.Module in evaluation mode
```

Wherever a config or a tool takes weights, it takes `qbheat://{name}`. With
`QBHEAT_ZOO_HUB={repository}`, entries of the package's own index are downloaded from here.

Files are safetensors, matrices and filters in float16 and all else in float32. Each holds the
config of its model, the names of its classes and its pixel statistics. `index.json` has the SHA-256
of each file and a fingerprint of the model's outputs on synthetic images, so that
`tools/zoo.py verify` shows whether weights, pre-processing and code agree on a machine."""


def push_entries(
    entries: Sequence[ZooEntry], repository: str, *, private: bool = False, message: str = ""
) -> str:
    """Uploads weights with their index and a model card in one commit; keeps other entries.

    The hub's own client logs in: ``hf auth login``, or ``$HF_TOKEN``.

    Args:
        entries: one at least; their files are fetched and their hashes checked.
        repository: OWNER/NAME; created if missing.
        private: whether a new repository is private.
        message: of the commit; by default the names of the entries.

    Returns:
        The address of the commit.

    Raises:
        UserError: a file cannot be fetched, or the hub refuses.
    """
    files = {entry.file: fetch(entry) for entry in entries}
    with _hub(repository) as api:
        api.create_repo(repository, private=private, exist_ok=True)
        merged = {entry.name: entry for entry in (*_download_index(api, repository), *entries)}
        card = render_card([merged[name] for name in sorted(merged)], repository)
        content = render_index(merged.values(), Path(index.INDEX_FILE.name))
        commit = api.create_commit(
            repository,
            [
                CommitOperationAdd("README.md", card.encode()),
                CommitOperationAdd(index.INDEX_FILE.name, content),
                *[CommitOperationAdd(name, str(path)) for name, path in files.items()],
            ],
            commit_message=message or f"Add {', '.join(entry.name for entry in entries)}",
        )
    return str(commit.commit_url)


def pull_entries(repository: str, folder: Path, pattern: str = "*") -> list[Path]:
    """Downloads a repository's index and some of its weights into a folder for ``$QBHEAT_ZOO``.

    Args:
        repository: OWNER/NAME, or OWNER/NAME@REVISION.
        folder: of this repository alone; its index is replaced.
        pattern: shell pattern of names.

    Returns:
        The paths of the files, each with the hash of the index.

    Raises:
        UserError: the hub does not have the entries, or the index or a file is invalid.
    """
    with _hub(repository) as api:
        there = _download_index(api, repository)
    entries = [entry for entry in there if fnmatch.fnmatchcase(entry.name, pattern)]
    if not entries:
        names = ", ".join(entry.name for entry in there) or f"no {index.INDEX_FILE.name}"
        raise UserError(f"'{repository}' has nothing that matches '{pattern}', but {names}")
    try:
        files = [download_from_hub(repository, entry, folder) for entry in entries]
    except UnavailableError as error:
        raise UserError(f"'{repository}' cannot be downloaded: {error}") from error
    save_index(there, folder / index.INDEX_FILE.name)
    return files


def render_card(entries: Sequence[ZooEntry], repository: str) -> str:
    """Returns the README of a repository: metadata for the hub, its entries, and their usage."""
    licences = {entry.licence.lower() for entry in entries}
    tasks = sorted({_PIPELINES[entry.task] for entry in entries})
    data = ModelCardData(
        license=licences.pop() if len(licences) == 1 else "other",
        library_name="qbheat_det",
        tags=[*_TAGS, *(tasks if len(tasks) > 1 else ())],
        pipeline_tag=tasks[0] if len(tasks) == 1 else None,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repository.rpartition('/')[2]}",
        *[describe_entry(entry, "##", recipe=f"`configs/{entry.config}`") for entry in entries],
        _USAGE.format(name=entries[0].name, repository=repository),
    ]
    return "\n\n".join(parts) + "\n"


def _download_index(api: HfApi, repository: str) -> tuple[ZooEntry, ...]:
    name, _, revision = repository.partition("@")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(
                name, index.INDEX_FILE.name, revision=revision or None, local_dir=folder
            )
        except (RemoteEntryNotFoundError, RepositoryNotFoundError):
            return ()
        return load_index(Path(path))


@contextlib.contextmanager
def _hub(repository: str) -> Iterator[HfApi]:
    """Gives a client of the hub; its errors become ``UserError``."""
    try:
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    except (HfHubHTTPError, OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = (
            "; log in with 'hf auth login', or set $HF_TOKEN to a token that may write there"
            if status in (401, 403)
            else ""
        )
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the hub refuses '{repository}': {reason}{advice}") from error
