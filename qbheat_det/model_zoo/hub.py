# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Uploads weights with a model card to Hugging Face's hub, and downloads weights.

A repository contains ``model.safetensors``, with config and classes in its metadata, and
``README.md``. Downloaded files cannot run code.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import one_line

from .index import PREFIX, list_entries

HUB_PREFIX = "hf://"
WEIGHTS_NAME = "model.safetensors"
_REPO = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
_LICENCES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-4.0")  # known to the hub
_CARD = """\
# {title}

{summary}

{facts}

## Use

```python
import qbheat_det

{kind} = qbheat_det.load("hf://USER/NAME")
{call}
```

The config is inside `model.safetensors`. Loading it runs no code from this repository.
"""


def save_pretrained(cfg: CfgNode, folder: Path, *, is_detector: bool) -> Path:
    """Writes the weights that ``cfg`` names, and a model card, to a folder; returns the folder."""
    state, info = read_weights(str(cfg.MODEL.WEIGHTS))
    if info is None or not info.config:
        info = WeightsInfo.from_config(cfg, iteration=0, commit="")
    save_weights(str(folder / WEIGHTS_NAME), state, info)
    write_atomically(folder / "README.md", render_card(cfg, is_detector=is_detector).encode())
    return folder


def render_card(cfg: CfgNode, *, is_detector: bool) -> str:
    """Returns a model card in Markdown, with the header that Hugging Face reads.

    The card describes an entry of the model zoo by its fields, and all other weights by the config.
    """
    node, name = cfg.MODEL, str(cfg.MODEL.WEIGHTS).removeprefix(PREFIX)
    entry = next((entry for entry in list_entries() if entry.name == name), None)
    kind, call = "encoder", 'encoder("a.jpg")'
    if is_detector:
        kind, call = "detector", 'detector.predict("photo.jpg").save("drawn.jpg")'
    header: dict[str, Any] = {
        "library_name": "qbheat_det",
        "pipeline_tag": "object-detection" if is_detector else "image-feature-extraction",
        "tags": ["detectron2", "mobile-former" if "former" in str(cfg.MODEL).lower() else "timm"],
    }
    facts = {"Model": f"`{node.META_ARCHITECTURE}` on `{node.BACKBONE.NAME}`"}
    if is_detector and node.CLASS_NAMES:
        facts["Classes"] = ", ".join(node.CLASS_NAMES)
    title, summary = f"{kind.capitalize()} on {node.BACKBONE.NAME}", "Trained with qbheat_det."
    if entry:
        title, summary = entry.name, entry.summary
        licence = entry.licence.lower().replace(" ", "-")
        header["license"] = licence if licence in _LICENCES else "other"
        header["license_name"] = entry.licence
        facts["Licence"] = entry.licence
        facts["Data"] = f"{entry.data} ({entry.data_licence})"
        facts |= {metric.data: str(metric) for metric in entry.metrics}
    text = _CARD.format(
        title=title,
        summary=summary,
        facts="\n".join(f"- {key}: {value}" for key, value in facts.items()),
        kind=kind,
        call=call,
    )
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{text}"


def push_to_hub(
    save: Callable[[Path], Path], repo_id: str, *, private: bool, token: str | None
) -> str:
    """Uploads the files that ``save`` writes to a folder, and returns the URL of the commit.

    Raises a ``UserError`` if ``repo_id`` is not "user/name", or if the upload fails.
    """
    _check_repo(repo_id)
    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder))
        card = saved / "README.md"
        card.write_text(card.read_text("utf-8").replace("USER/NAME", repo_id), "utf-8")
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=saved, commit_message="Upload by qbheat_det"
            )
        except Exception as error:  # errors of network, token and repository have no common base
            raise UserError(f"'{repo_id}' cannot be uploaded: {one_line(error)}") from error
    return str(commit.commit_url)


def download(address: str) -> str:
    """Downloads ``hf://user/name`` or ``hf://user/name@revision``, and returns the local path.

    Raises a ``UserError`` if the address is invalid, or the file cannot be downloaded.
    """
    repo_id, _, revision = address.removeprefix(HUB_PREFIX).partition("@")
    _check_repo(address.removeprefix(HUB_PREFIX))
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(repo_id, WEIGHTS_NAME, revision=revision or None))
    except Exception as error:  # as above
        raise UserError(
            f"'{address}' has no {WEIGHTS_NAME} that can be downloaded: {one_line(error)}"
        ) from error


def _check_repo(name: str) -> None:
    if not _REPO.fullmatch(name):
        raise UserError(f"'{name}' is not a repository: expected user/name, or user/name@revision")
