# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Warns if a backbone loads weights that were trained on other pixels than those of its config.

This package's checkpointers read the pixels in the metadata of a file. Detectron2's checkpointer
does not. For it, the encoders at ``qbheat://NAME`` have the pixels as entries of the state dict.
"""

from typing import Any

from detectron2.modeling import Backbone
from torch import Tensor

from qbheat_det.config import Pixels, warn_of_other_pixels


def check_trained_pixels(backbone: Backbone, pixels: Pixels | None) -> None:
    """Sets ``backbone.pixels``, with which ``load_state_dict`` compares those of the weights."""
    backbone.pixels = pixels or Pixels()
    backbone.register_load_state_dict_pre_hook(_compare_pixels)


def _compare_pixels(backbone: Backbone, state_dict: dict[str, Tensor], *_: Any) -> None:
    """A hook that runs before ``load_state_dict``."""
    warn_of_other_pixels(Pixels.pop_from(state_dict), backbone.pixels)
