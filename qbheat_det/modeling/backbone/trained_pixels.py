# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Warns if a backbone loads weights that were trained on other pixels than those of its config.

This package's checkpointers read the pixels in the metadata of a file. Detectron2's checkpointer
does not. For it, the encoders at ``qbheat://NAME`` have the pixels as entries of the state dict.
"""

import logging
from typing import Any

from detectron2.modeling import Backbone
from torch import Tensor

from qbheat_det.config import Pixels, warn_of_other_pixels

logger = logging.getLogger(__name__)


def check_trained_pixels(backbone: Backbone, pixels: Pixels | None) -> None:
    """Sets ``backbone.pixels``, with which ``load_state_dict`` compares those of the weights."""
    backbone.pixels = pixels or Pixels()
    backbone.register_load_state_dict_pre_hook(_compare_pixels)


def _compare_pixels(
    backbone: Backbone, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """A hook that runs before ``load_state_dict``. ``prefix`` is the backbone's path in a model."""
    trained = Pixels.pop_from(state_dict)
    is_in_model = bool(prefix)
    if is_in_model and trained != Pixels() and backbone.pixels == Pixels():
        # A LazyConfig without ``pixels``. Detectron2's models normalize images by BGR by default.
        logger.warning(
            "The weights were trained with the pixels %s: set the model's input_format, pixel_mean "
            "and pixel_std to them, and image_format of the data mappers. To have them compared, "
            "pass pixels=Pixels(…) to %s",
            trained,
            type(backbone).__name__,
        )
    warn_of_other_pixels(trained, backbone.pixels)
