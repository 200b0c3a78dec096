# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The card of a repository of weights, and the lines that tell how to use them."""

from collections.abc import Sequence

import yaml

from qbheat_det.model_zoo.index import ZooEntry

from .table import fence, format_figure

# Names of tasks and licences as the hub has them.
_PIPELINES = {
    "pretraining": "image-feature-extraction",
    "detection": "object-detection",
    "classification": "image-classification",
}
_TAGS = ["qbheat_det", "detectron2", "mobile-former"]
_USE = """\
## How to use them

With [Detectron2](https://github.com/facebookresearch/detectron2) and `qbheat_det` installed:

```sh
export QBHEAT_ZOO_HUB={repository}
python tools/zoo.py pull --repo {repository} --output my_zoo   # or all of it, with its index
QBHEAT_ZOO=my_zoo python tools/zoo.py verify '{name}'
```

```python
import qbheat_det.model_zoo as zoo

model = zoo.get("{name}")  # an nn.Module in evaluation mode
```

Wherever a config or a tool takes weights, it takes `qbheat://{name}`, such as
`MODEL.WEIGHTS qbheat://{name}`."""
_FILES = """\
Files are safetensors, matrices and filters in float16 and all else in float32; each holds the
config that its model is built from, the names of its classes and its pixels' mean and deviation.
`index.json` has, for each, the SHA-256, what made it, and a functional fingerprint: what the model
gives on images drawn by integer arithmetic, so that `tools/zoo.py verify` can tell on any machine
whether weights, pre-processing and code still agree."""


def render_card(entries: Sequence[ZooEntry], repository: str) -> str:
    """Returns the README of a repository of the hub.

    Args:
        entries: all that the repository holds, one at least.
        repository: its OWNER/NAME.
    """
    head = yaml.safe_dump(_front_matter(entries), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{head}---",
        f"# {repository.rpartition('/')[2]}",
        "Weights of the model zoo of `qbheat_det`: Mobile-Former, QB-Heat and detectors on them.",
        *[_describe(entry) for entry in entries],
        _USE.format(name=entries[0].name, repository=repository),
        _FILES,
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(entries: Sequence[ZooEntry]) -> dict[str, object]:
    licences = sorted({entry.licence.lower() for entry in entries})
    tasks = sorted({_PIPELINES[entry.task] for entry in entries})
    matter: dict[str, object] = {
        "license": licences[0] if len(licences) == 1 else "other",
        "library_name": "qbheat_det",
        "tags": [*_TAGS, *(tasks if len(tasks) > 1 else ())],
    }
    return {**matter, "pipeline_tag": tasks[0]} if len(tasks) == 1 else matter


def _describe(entry: ZooEntry) -> str:
    height, width = entry.madds_input
    lines = [
        f"## {entry.name}",
        "",
        entry.summary,
        "",
        f"- file: `{entry.file}`, {entry.size:,} bytes, SHA-256 `{entry.sha256}`",
        f"- parameters: {entry.num_params / 1e6:.1f} M; multiply-adds: {entry.madds / 1e9:.2f} G "
        f"at {height}x{width}",
        f"- trained on: {entry.data} (licence: {entry.data_licence})",
        f"- licence of the weights: {entry.licence}",
        f"- recipe: `configs/{entry.config}`, commit `{entry.commit}`, {entry.date}",
        *[f"- {format_figure(figure)}" for figure in entry.figures],
        *([] if entry.figures else ["- no figures were measured"]),
        "",
        *fence(entry.command),
    ]
    return "\n".join(lines)
