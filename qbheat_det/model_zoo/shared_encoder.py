# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights without the frozen encoder that another entry has: a head of a few MB is all they add.

In such a file, the part, the encoder's tensors are empty; joined with the encoder's file it is the
whole file, always with the same bytes.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qbheat_det.checkpoint import WeightsInfo, bare_backbone, read_weights, save_weights
from qbheat_det.core.errors import UserError


def write_part(whole: Path, encoder: Path, part: Path) -> None:
    """Writes weights without the tensors of their encoder.

    Args:
        whole: trained weights, with their config.
        encoder: weights of the frozen encoder, alone or with other modules.
        part: the new file.

    Raises:
        UserError: the two encoders differ, or the weights have no config.
    """
    state, info = _read_described(whole)
    own, known = bare_backbone(state), _read_encoder(encoder)
    for name, short in own.items():
        if short not in known or not torch.equal(state[name], known[short]):
            raise UserError(f"the encoder of '{whole}' is not that of '{encoder}': see '{name}'")
    empty = {name: state[name].new_empty(0) for name in own}
    save_weights(str(part), {**state, **empty}, info)


def write_whole(part: Path, encoder: Path, whole: Path) -> None:
    """Joins what ``write_part`` has split."""
    state, info = _read_described(part)
    known = _read_encoder(encoder)
    joined = {name: known[short] for name, short in bare_backbone(state).items()}
    save_weights(str(whole), {**state, **joined}, info)


def _read_described(path: Path) -> tuple[dict[str, Tensor], WeightsInfo]:
    state, info = read_weights(str(path))
    if info is None:
        raise UserError(f"'{path}' has no config inside")
    return state, info


def _read_encoder(path: Path) -> Mapping[str, Tensor]:
    """Returns tensors by their names in a backbone."""
    state, _ = read_weights(str(path))
    return {short: state[name] for name, short in bare_backbone(state).items()} or state
