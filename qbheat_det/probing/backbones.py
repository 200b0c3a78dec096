# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loads backbones to probe from the weights of any model that contains them."""

import logging

from detectron2.modeling import Backbone

from qbheat_det.checkpoint import (
    WeightsInfo,
    bare_backbone,
    fit_weights,
    load_embedded_config,
    read_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import optional_modules

logger = logging.getLogger(__name__)


def load_backbone(backbone: Backbone, weights: str) -> WeightsInfo | None:
    """Fills a backbone from the weights of any model that has it, or from a bare one.

    Returns:
        The metadata of the file.

    Raises:
        UserError: the tensors of the file's backbone are not exactly those of this one.
    """
    state, info = read_weights(weights)
    names = bare_backbone(state)
    bare = {short: state[name] for name, short in names.items()} if names else state
    optional = optional_modules(backbone)
    fitting, report = fit_weights(
        bare, backbone.state_dict(), file=weights, optional_modules=optional
    )
    groups = report.groups.values()
    filled, total = report.num_loaded, sum(group.num_tensors for group in groups)
    if filled < total or report.unexpected:
        raise UserError(
            f"'{weights}' fills {filled} of the {total} tensors of the config's backbone, and has "
            f"{len(report.unexpected)} more: name its own config with --config-file"
        )
    backbone.load_state_dict(fitting, strict=False)
    logger.info(f"'{weights}': {filled}/{total} backbone tensors")
    return info


def find_feature(backbone: Backbone, wanted: str = "") -> str:
    """Returns the name of the map to probe: the coarsest, of several the last.

    Raises:
        UserError: the backbone has no map of the wanted name.
    """
    strides = {
        name: shape.stride for name, shape in backbone.output_shape().items() if shape.stride
    }
    if wanted and wanted not in strides:
        raise UserError(f"the backbone has no map '{wanted}', but {', '.join(strides)}")
    return wanted or max(reversed(strides), key=strides.__getitem__)


def count_images_seen(info: WeightsInfo | None) -> int | None:
    """Returns the number of training images of weights; None if unknown."""
    if info is None or not info.config:
        return None
    try:
        cfg = load_embedded_config(info.config, "the config inside the weights")
    except UserError:  # of another version of the package, which does not make the weights worse
        return None
    return (info.iteration + 1) * int(cfg.SOLVER.IMS_PER_BATCH)
