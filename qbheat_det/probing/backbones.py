# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loads the backbones that are probed from the weights of any model that contains them."""

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
        What the file says of itself.

    Raises:
        UserError: a tensor of it is not in the file, or of another shape, or the file's backbone
            has more.
    """
    state, info = read_weights(weights)
    names = bare_backbone(state)
    bare = {short: state[name] for name, short in names.items()} if names else state
    unbuilt = optional_modules(backbone)
    fitting, report = fit_weights(
        bare, backbone.state_dict(), file=weights, optional_modules=unbuilt
    )
    groups = report.groups.values()
    filled, total = report.num_loaded, sum(group.num_tensors for group in groups)
    if filled < total or report.unexpected:
        more = f", and holds {len(report.unexpected)} that it lacks" if report.unexpected else ""
        raise UserError(
            f"'{weights}' fills {filled} of the {total} tensors of the config's backbone{more}: "
            "name the config that belongs to these weights with --config-file"
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
    # Of the coarsest maps the last, which is the deepest.
    return wanted or max(reversed(strides), key=strides.__getitem__)


def count_images_seen(info: WeightsInfo | None) -> int | None:
    """Returns how many images went into trained weights; None where the file does not tell."""
    if info is None or not info.config:
        return None
    try:
        cfg = load_embedded_config(info.config, "the config inside the weights")
    except UserError:  # of another version of the package, which does not make the weights worse
        return None
    return (info.iteration + 1) * int(cfg.SOLVER.IMS_PER_BATCH)
