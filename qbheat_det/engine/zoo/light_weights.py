# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights as they travel: half the bytes, and nothing of the machine that trained them."""

import dataclasses
import re
from collections.abc import Mapping

from detectron2.config import CfgNode
from torch import Tensor

from qbheat_det.checkpoint import WeightsInfo
from qbheat_det.config import dump_config, get_cfg

# Absolute, below someone's home, of Windows, of a server or the file system, or upwards.
_PATH = re.compile(r"([/~\\]|[A-Za-z]:[\\/]|file:).*|(.*[\\/])?\.\.([\\/].*)?", re.DOTALL)
# What a run read and wrote, and where it was logged: of no meaning elsewhere.
_OF_THE_RUN = (
    "OUTPUT_DIR",
    "MODEL.WEIGHTS",
    "MODEL.CACHE_FEATURES.FOLDER",
    "DATASETS.PROPOSAL_FILES_TRAIN",
    "DATASETS.PROPOSAL_FILES_TEST",
    "SOLVER.WANDB_PROJECT",
)


def halve_precision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with matrices and filters in float16.

    Vectors and single numbers stay in float32: they are some per cent of a file at most, each
    acts on a whole channel, and a variance of BatchNorm may be smaller than float16 can tell from
    zero, or larger than it can hold. A matrix with a number beyond float16's range stays as well.
    Integers stay what they are.

    Args:
        state: a model's tensors by name.
    """
    return {name: _halve(tensor) for name, tensor in state.items()}


def _halve(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    full = tensor.float()
    half = full.half()
    return half if tensor.dim() > 1 and bool(half.isfinite().all()) else full


def forget_machine(info: WeightsInfo, cfg: CfgNode) -> WeightsInfo:
    """Returns the description with a config that names no folder of the training machine.

    Args:
        info: as it stood in the file.
        cfg: the file's config.
    """
    own, fresh = cfg.clone(), get_cfg()
    own.defrost()
    _reset_paths(own, fresh, "")
    return dataclasses.replace(info, config=dump_config(own))


def _reset_paths(node: CfgNode, fresh: CfgNode, prefix: str) -> None:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, CfgNode):
            _reset_paths(value, fresh[key], f"{name}.")
        elif name in _OF_THE_RUN or (name != "MODEL.CLASS_NAMES" and _names_path(value)):
            node[key] = fresh[key]


def _names_path(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_names_path, value))
    return isinstance(value, str) and _PATH.fullmatch(value) is not None
