# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The config that belongs to trained weights, found inside them or beside them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from detectron2.config import CfgNode

from qbheat_det.checkpoint import info_of
from qbheat_det.config import get_cfg, load_config
from qbheat_det.errors import UserError


def load_run_config(
    weights: str,
    config_file: str | None = None,
    *,
    device: str | None = None,
    opts: Sequence[str] = (),
) -> CfgNode:
    """Returns the config that belongs to trained weights, with ``MODEL.WEIGHTS`` set to them.

    Args:
        weights: path of the weights.
        config_file: YAML; None takes the config inside the weights, or else ``config.yaml`` in
            their folder.
        device: "cpu" or "cuda"; None takes ``MODEL.DEVICE`` of ``opts``, else the GPU if any.
        opts: alternating keys and values that override the file.

    Raises:
        UserError: a file is missing, the config is not sound, or there is no such device.
    """
    cfg = load_config(config_file, opts) if config_file else _load_own_config(weights, opts)
    if device is None and "MODEL.DEVICE" not in opts[::2]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg.MODEL.DEVICE = device or cfg.MODEL.DEVICE
    if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but PyTorch sees no GPU: use --device cpu")
    cfg.MODEL.WEIGHTS = weights
    return cfg


def _load_own_config(weights: str, opts: Sequence[str]) -> CfgNode:
    info = info_of(weights)
    if info is None or not info.config:
        beside = Path(weights).parent / "config.yaml"
        if not beside.is_file():
            raise UserError(
                f"no config inside '{weights}' and no config.yaml beside it: name one with "
                "--config-file"
            )
        return load_config(beside, opts)
    try:
        events = list(yaml.parse(info.config, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"the config inside '{weights}' is not plain YAML") from error
    if "_BASE_" in info.config or any(isinstance(event, yaml.AliasEvent) for event in events):
        raise UserError(
            f"the config inside '{weights}' is refused: it refers to other files or to itself"
        )
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "config.yaml"
        unpacked.write_text(info.config, encoding="utf-8", errors="replace")
        try:
            cfg = load_config(unpacked, opts)
        except (UserError, RecursionError) as error:
            inside = f"the config inside '{weights}'"
            sentence = str(error).replace(str(unpacked), inside)
            raise UserError(sentence if inside in sentence else f"{inside}: {sentence}") from error
    if "OUTPUT_DIR" not in opts[::2]:  # a folder of whoever trained the weights
        cfg.OUTPUT_DIR = get_cfg().OUTPUT_DIR
    return cfg
