# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Names of timm's models, checked where a person writes them."""

import difflib

import timm
from detectron2.config import CfgNode

from qbheat_det.errors import UserError

TIMM_PREFIX = "timm:"
"""What stands before the name of a timm model where a config names a backbone."""


def check_timm_name(name: str) -> None:
    """
    Raises:
        UserError: timm has no model of that name, and the sentence has the nearest ones; or the
            name goes on with the tag of weights.
    """
    model, _, tag = name.partition(".")
    if not timm.is_model(model):
        near = difflib.get_close_matches(model, timm.list_models(), n=3, cutoff=0.3)
        raise UserError(
            f"timm {timm.__version__} has no model '{model}'; did you mean "
            f"{', '.join(near) or 'resnet50'}?"
        )
    if tag:
        raise UserError(
            f"'{name}' names weights, the model is '{model}': to start from these weights, set "
            f"MODEL.WEIGHTS to 'timm://{name}'"
        )


def check_timm_backbones(cfg: CfgNode) -> None:
    """Checks the two keys that can name a timm model as ``timm:<name>``.

    Raises:
        UserError: see ``check_timm_name``.
    """
    for key, value in (
        ("MODEL.BACKBONE.NAME", cfg.MODEL.BACKBONE.NAME),
        ("MODEL.FPN.BOTTOM_UP", cfg.MODEL.FPN.BOTTOM_UP),
    ):
        if value.startswith(TIMM_PREFIX):
            try:
                check_timm_name(value.removeprefix(TIMM_PREFIX))
            except UserError as error:
                raise UserError(f"{key} '{value}': {error}") from None
