# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Config keys of scattered masking, with their defaults and one comment each."""

from detectron2.config import CfgNode


def add_scattered_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.SCATTERED`` to a config, in place.

    Map, projection, decoder and target are those of ``MODEL.QB_HEAT``.
    """
    cfg.MODEL.SCATTERED = CfgNode()
    # Share of the positions of the map whose pixels the encoder does not see.
    cfg.MODEL.SCATTERED.MASK_RATIO = 0.75
