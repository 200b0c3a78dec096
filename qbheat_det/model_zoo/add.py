# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Adds entries, with weights in half precision, to the model zoo."""

import dataclasses
import datetime
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from torch import Tensor

from qbheat_det.checkpoint import WeightsInfo, load_run_config, read_weights, save_weights
from qbheat_det.config import dump_config, get_cfg, get_config_path, with_values
from qbheat_det.core.environment import find_commit
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, hash_file, write_atomically

from . import index, sources
from .index import Metric, SharedEncoder, ZooEntry, file_of, parse_entry, to_plain
from .sources import open_trained
from .verify import compute_fingerprint, count_costs, find_task

logger = logging.getLogger(__name__)
MAX_SHIPPED = 40_000_000
"""Maximum size in bytes of all weights that are shipped with the package."""

# Paths that are absolute, in a home folder, of Windows or a server, URLs, or that contain "..".
_PATH = re.compile(r"([/~\\]|[A-Za-z]:[\\/]|file:).*|(.*[\\/])?\.\.([\\/].*)?", re.DOTALL)
# Keys whose values are meaningful only on the machine of the run.
_KEYS_OF_THE_RUN = (
    "OUTPUT_DIR",
    "MODEL.WEIGHTS",
    "MODEL.CACHE_FEATURES.FOLDER",
    "DATASETS.PROPOSAL_FILES_TRAIN",
    "DATASETS.PROPOSAL_FILES_TEST",
)


def add_entry(
    weights: str,
    description: Mapping[str, Any],
    *,
    metrics: Sequence[Metric] = (),
    encoder: str = "",
    output: Path | None = None,
    replace: bool = False,
) -> ZooEntry:
    """Writes weights in half precision, and adds an entry to the index in the same folder.

    The fingerprint is computed from the file in half precision.

    Args:
        weights: weights of a trained model or a bare backbone, with the config inside the file or
            in the same folder.
        description: fields of ``ZooEntry`` that are not in the file.
        metrics: metrics that were measured with the weights.
        encoder: name of the entry whose encoder was frozen in training. The encoder is not stored
            again.
        output: a folder with its own index; None ships the file with the package.
        replace: whether to replace an existing entry.

    Raises:
        UserError: the weights cannot be read or do not fit their model, the entry exists, a field
            is invalid, or the shipped weights would be too large.
    """
    folder = sources.SHIPPED if output is None else output
    index_file = index.INDEX_FILE if output is None else output / index.INDEX_FILE.name
    others = _read_others(index_file, description["name"], replace=replace)
    get_config_path(description["config"])
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / file_of(description["name"])
        state, info = read_weights(weights)
        cfg = load_run_config(weights, device="cpu")
        info = info or WeightsInfo.from_config(cfg, iteration=0, commit="")
        save_weights(str(file), halve_precision(state), remove_machine_paths(info, cfg))
        trained = open_trained(str(file), device="cpu")
        shared, stored = _leave_out_encoder(file, encoder) if encoder else (None, file)
        entry = ZooEntry(
            **description,
            commit=(info.commit or find_commit()).removesuffix("-dirty"),
            date=datetime.date.today().isoformat(),
            **count_costs(trained),
            task=find_task(trained),
            file=file.name,
            sha256=hash_file(file),
            size=file.stat().st_size,
            metrics=tuple(metrics),
            encoder=shared,
        )
        parse_entry(to_plain(entry), f"entry {entry.name}")  # before the slow steps
        if output is None:
            _check_shipped_size([*others, entry])
        fingerprint = compute_fingerprint(trained.model, trained.cfg)
        entry = dataclasses.replace(entry, fingerprint=fingerprint)
        content = index.render_index([*others, entry], index_file)
        check_writable(index_file)
        write_atomically(folder / entry.stored.file, stored.read_bytes())
        write_atomically(index_file, content)
    return entry


def _leave_out_encoder(file: Path, encoder: str) -> tuple[SharedEncoder, Path]:
    """Splits the encoder off a file; returns the encoder's record and the path of the part.

    Replaces the file by the join of part and encoder, as users will get it.
    """
    part = file.with_suffix(".part.safetensors")
    encoder_file = sources.fetch(sources.find_encoder(encoder))
    sources.write_part(file, encoder_file, part)
    sources.write_whole(part, encoder_file, file)
    return SharedEncoder(encoder, hash_file(part), part.stat().st_size), part


def halve_precision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors with at least two dimensions (matrices, filters) to float16.

    Vectors and scalars stay in float32. They are small, and float16 would turn some variances of
    BatchNorm into 0 or infinity. Tensors with values outside the range of float16 stay in float32.
    """
    halved = {}
    for name, tensor in state.items():
        full = tensor.float() if tensor.is_floating_point() else tensor
        fits = full.is_floating_point() and full.dim() > 1 and bool(full.half().isfinite().all())
        halved[name] = full.half() if fits else full
    return halved


def remove_machine_paths(info: WeightsInfo, cfg: CfgNode) -> WeightsInfo:
    """Returns a description with the config ``cfg``, without paths of the training machine."""
    own = with_values(cfg)
    _reset_paths(own, get_cfg(), "")
    return dataclasses.replace(info, config=dump_config(own))


def _read_others(index_file: Path, name: str, *, replace: bool) -> list[ZooEntry]:
    """Returns the entries of an index, if it exists, except the entry with this name."""
    entries = index.load_index(index_file) if index_file.exists() else ()
    if not replace and name in {entry.name for entry in entries}:
        raise UserError(f"'{name}' is already in '{index_file}': use --replace to replace it")
    if index_file != index.INDEX_FILE:
        shipped = {entry.file.lower() for entry in index.load_index()}
        if file_of(name).lower() in shipped:
            raise UserError(f"'{name}' is an entry of the package itself: choose another name")
    for entry in entries:
        if entry.encoder and entry.encoder.name == name:
            logger.warning(f"'{entry.name}' leaves out the tensors of '{name}': add it again, too")
    return [entry for entry in entries if entry.name != name]


def _check_shipped_size(entries: Sequence[ZooEntry]) -> None:
    *others, new = [entry.stored for entry in entries]
    here = [entry for entry in others if (sources.SHIPPED / entry.file).is_file()]
    total = sum(entry.size for entry in [*here, new])
    if total > MAX_SHIPPED:
        raise UserError(
            f"with '{new.name}' the package's weights would have {total / 1e6:.1f} MB of "
            f"{MAX_SHIPPED / 1e6:.0f} MB: write it elsewhere with --output"
        )


def _reset_paths(node: CfgNode, fresh: CfgNode, prefix: str) -> None:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, CfgNode):
            _reset_paths(value, fresh[key], f"{name}.")
        elif name in _KEYS_OF_THE_RUN or (name != "MODEL.CLASS_NAMES" and _has_path(value)):
            node[key] = fresh[key]


def _has_path(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_path, value))
    return isinstance(value, str) and _PATH.fullmatch(value) is not None
