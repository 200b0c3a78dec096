# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which levels of a feature pyramid the heads of a config read.

A level that no head reads has parameters without gradients. With several processes, PyTorch's
``DistributedDataParallel`` then ends the run at its second step.
"""

from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, ROI_MASK_HEAD_REGISTRY, SEM_SEG_HEADS_REGISTRY
from fvcore.common.registry import Registry


def list_read_levels(cfg: CfgNode, levels: Sequence[str]) -> list[str]:
    """Returns those of a pyramid's ``levels`` that the heads of a config read, in their order.

    Returns all levels if the meta-architecture is unknown, or if a head reads an output that is not
    among the levels. Keys ``MODEL.….IN_FEATURES`` of other projects count as read.
    """
    model = cfg.MODEL
    arch = _class_names(META_ARCH_REGISTRY, model.META_ARCHITECTURE)
    mask_head: set[str] = set()
    if "GeneralizedRCNN" in arch and model.MASK_ON:
        mask_head = _class_names(ROI_MASK_HEAD_REGISTRY, model.ROI_MASK_HEAD.NAME)
    segmentation_head: set[str] = set()
    if arch & {"SemanticSegmentor", "PanopticFPN"}:
        segmentation_head = _class_names(SEM_SEG_HEADS_REGISTRY, model.SEM_SEG_HEAD.NAME)
    has_proposals = bool(arch & {"GeneralizedRCNN", "ProposalNetwork"})
    is_precomputed = model.PROPOSAL_GENERATOR.NAME == "PrecomputedProposals"
    is_implicit = "ImplicitPointRendMaskHead" in mask_head  # always reads points
    is_point_rend = "PointRendMaskHead" in mask_head
    has_points = is_point_rend and (is_implicit or model.ROI_MASK_HEAD.POINT_HEAD_ON)
    # The groups of MODEL with a key IN_FEATURES, and whether the model reads this key.
    is_read = {
        "RETINANET": "RetinaNet" in arch,
        "FCOS": "SyncFCOS" in arch,
        "MF_DETR": "MFDETR" in arch,
        "RPN": has_proposals and not is_precomputed,
        "ROI_HEADS": "GeneralizedRCNN" in arch,
        "SEM_SEG_HEAD": bool(segmentation_head),
        # Keys of Detectron2's projects PointRend and TensorMask.
        "ROI_MASK_HEAD": is_point_rend,
        "POINT_HEAD": has_points or "PointRendSemSegHead" in segmentation_head,
        "TENSOR_MASK": "TensorMask" in arch,
    }
    if not any(is_read.values()):
        return list(levels)

    read: set[str] = set()
    for group, node in model.items():
        if group == "FPN" or not isinstance(node, CfgNode) or "IN_FEATURES" not in node:
            continue
        if group not in is_read:
            read.update(set(node.IN_FEATURES) & set(levels))
        elif is_read[group]:
            read.update(node.IN_FEATURES)
    if not read <= set(levels):
        return list(levels)
    return [level for level in levels if level in read]


def _class_names(registry: Registry, name: str) -> set[str]:
    """Returns the names of a registered class and its bases. Empty if the name is unknown."""
    if name not in registry:
        return set()
    return {base.__name__ for base in getattr(registry.get(name), "__mro__", ())}
