# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loads the config of trained weights, from inside the file or from the same folder."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from detectron2.config import CfgNode

from qbheat_det.config import get_cfg, get_value, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.core.yaml_text import load_yaml

from .matching import bare_backbone
from .weights_file import find_weights, info_of, local_weights, read_weights

# If the first key is True, Detectron2 unpickles the files that the other two keys name.
_UNPICKLED = (
    "MODEL.LOAD_PROPOSALS",
    "DATASETS.PROPOSAL_FILES_TRAIN",
    "DATASETS.PROPOSAL_FILES_TEST",
)


def load_run_config(
    weights: str,
    config_file: str | None = None,
    *,
    device: str | None = None,
    opts: Sequence[str] = (),
) -> CfgNode:
    """Returns the config of trained weights, with ``MODEL.WEIGHTS`` set to the path of the weights.

    Args:
        weights: any name that ``find_weights`` accepts.
        config_file: path of the config; None uses the config inside the weights, or else the
            ``config.yaml`` in the same folder.
        device: "cpu" or "cuda"; None uses ``MODEL.DEVICE`` in ``opts``, or else the GPU if there is
            one.
        opts: config overrides, as alternating keys and values.

    Raises:
        UserError: a file is missing, the config is invalid, or the device is not available.
    """
    weights = find_weights(weights)
    if config_file:
        cfg = load_config(config_file, opts)
        info = info_of(weights) if weights else None
        if info is not None and not cfg.MODEL.CLASS_NAMES:
            cfg.MODEL.CLASS_NAMES = list(info.class_names)
            cfg.MODEL.CATEGORY_IDS = list(info.category_ids)
    else:
        cfg = _load_config_of_weights(weights, opts)
    if device is None and "MODEL.DEVICE" in opts[::2]:
        device = cfg.MODEL.DEVICE
    cfg.MODEL.DEVICE = choose_device(device)
    cfg.MODEL.WEIGHTS = weights
    return cfg


def choose_device(device: str | None) -> str:
    """Returns ``device``; if it is None, "cuda" if there is a GPU, and "cpu" otherwise.

    A GPU with a number, such as "cuda:1", becomes the current GPU, which PyTorch seeds and measures
    by default. Raises a ``UserError`` if PyTorch cannot compute on the device.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    unknown = f"MODEL.DEVICE (device) is '{device}', expected cpu or cuda"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UserError(unknown) from error
    if parsed.type == "meta":  # its tensors have no values
        raise UserError(unknown)
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"MODEL.DEVICE (device) is '{device}', but PyTorch sees no GPU: use cpu")
    if parsed.type == "cuda" and parsed.index is not None:
        count = torch.cuda.device_count()
        if parsed.index >= count:
            raise UserError(f"MODEL.DEVICE (device) is '{device}', but PyTorch sees {count} GPUs")
        torch.cuda.set_device(parsed.index)
    return device


def _load_config_of_weights(weights: str, opts: Sequence[str]) -> CfgNode:
    """Loads the config inside the weights, or else ``config.yaml`` in the same folder."""
    info = info_of(weights)
    if info is not None and info.config:
        cfg = load_embedded_config(info.config, f"the config inside '{weights}'", opts)
        if "OUTPUT_DIR" not in opts[::2]:
            # The stored value is a folder of the machine that trained the weights.
            cfg.OUTPUT_DIR = get_cfg().OUTPUT_DIR
        return cfg
    config_file = Path(local_weights(weights)).parent / "config.yaml"
    if not config_file.is_file():
        raise UserError(f"no config inside '{weights}' or beside it: name one with --config-file")
    try:
        load_config(config_file)
    except UserError as error:
        raise UserError(
            f"{error}. If the run is of another project or of a LazyConfig, name a config of this "
            "package with --config-file"
        ) from error
    cfg = load_config(config_file, opts)
    _refuse_pickles(cfg, f"'{config_file}'", opts)
    return cfg


def load_embedded_config(text: str, where: str, opts: Sequence[str] = ()) -> CfgNode:
    """Reads an untrusted config inside another file, which messages refer to as ``where``.

    Raises a ``UserError`` if the text is not a valid config, has a ``_BASE_``, or names files that
    Detectron2 would unpickle. ``opts`` are overrides, as alternating keys and values.
    """
    try:
        content = load_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not plain YAML: {one_line(error)}") from error
    if isinstance(content, dict) and "_BASE_" in content:
        raise UserError(f"{where} is refused: it refers to other files")
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "config.yaml"
        unpacked.write_text(text, encoding="utf-8", errors="replace")
        try:
            cfg = load_config(unpacked, opts)
        except UserError as error:
            message = str(error).replace(str(unpacked), where)
            if where not in message:
                message = f"{where}: {message}"
            raise UserError(message) from error
    _refuse_pickles(cfg, where, opts)
    return cfg


def holds_backbone_alone(weights: str) -> bool:
    """Whether a file has only a backbone, such as the output of ``qbheat convert``.

    This is so if no tensor name has the prefix "backbone.", or if the config in the file does not
    set ``MODEL.META_ARCHITECTURE``.
    """
    state, info = read_weights(weights)
    if not bare_backbone(state):
        return True
    if info is None or not info.config:
        return False
    return info.value_of("MODEL.META_ARCHITECTURE") is None


def holds_encoder(weights: str) -> bool:
    """Whether a file has only a backbone, or a pre-training model, which has no class names."""
    if holds_backbone_alone(weights):
        return True
    info = info_of(weights)
    return info is not None and not info.class_names


def _refuse_pickles(cfg: CfgNode, where: str, opts: Sequence[str]) -> None:
    """Raises a ``UserError`` if a config names pickles, unless the user set the key in ``opts``."""
    user_keys = opts[::2]
    for key in _UNPICKLED:
        if get_value(cfg, key) and key not in user_keys:
            raise UserError(
                f"{where} is refused: it sets {key}, whose files are pickles, which can run code"
            )
