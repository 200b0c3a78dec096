# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A file of weights as the model that it fills, built from the config inside the file."""

from dataclasses import dataclass

from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_model
from torch import nn

from qbheat_det.analysis import CountingRule, count_detector_madds, count_madds, count_parameters
from qbheat_det.checkpoint import (
    ExactCheckpointer,
    LoadReport,
    bare_backbone,
    load_run_config,
    read_weights,
)
from qbheat_det.data import MAPPERS_OF_CLASSES, MAPPERS_OF_IMAGES
from qbheat_det.modeling.backbone.bare import build_bare_backbone
from qbheat_det.modeling.contracts import PretrainingObjective


@dataclass(frozen=True)
class TrainedModel:
    """A model that holds exactly the tensors of a file.

    Attributes:
        model: in evaluation mode, on the CPU; a bare backbone where the file holds no more.
        cfg: the config inside the file.
        report: of the hand-over.
    """

    model: nn.Module
    cfg: CfgNode
    report: LoadReport

    @property
    def task(self) -> str:
        """One of the zoo's tasks."""
        if isinstance(self.model, Backbone | PretrainingObjective):
            return "pretraining"
        is_classifier = self.cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES
        return "classification" if is_classifier else "detection"

    @property
    def num_loaded(self) -> tuple[int, int]:
        """How many of the model's tensors come from the file, and how many there are."""
        groups = self.report.groups.values()
        return sum(group.num_filled for group in groups), sum(g.num_tensors for g in groups)


@dataclass(frozen=True)
class Costs:
    """What a model costs.

    Attributes:
        num_params: parameters of all that the file holds, shared ones once.
        madds: multiply-adds of one image by ``CountingRule.CORE``; of a model of pre-training,
            those of its backbone on the whole image, which is what others take over.
        madds_input: (H, W) of that image in pixels.
    """

    num_params: int
    madds: int
    madds_input: tuple[int, int]


def open_trained(weights: str) -> TrainedModel:
    """Builds the model of a file and fills it.

    Args:
        weights: path of a file that holds its config, or has it beside it.

    Raises:
        UserError: the file cannot be read, or does not fill its model exactly.
    """
    cfg = load_run_config(weights, device="cpu")
    is_bare = not bare_backbone(read_weights(weights)[0])
    model: nn.Module = build_bare_backbone(cfg) if is_bare else build_model(cfg)
    names = () if is_bare else cfg.MODEL.CLASS_NAMES
    checkpointer = ExactCheckpointer(model, class_names=names)
    checkpointer.load(weights)
    assert checkpointer.report is not None
    return TrainedModel(model.eval(), cfg, checkpointer.report)


def count_costs(trained: TrainedModel) -> Costs:
    """Counts a model on an image of the size that it is evaluated on.

    A detector's is that of the config's shortest and longest edge, lying.
    """
    model, cfg = trained.model, trained.cfg
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        height = width = int(cfg.INPUT.PRETRAIN.SIZE)
    else:
        height, width = int(cfg.INPUT.MIN_SIZE_TEST), int(cfg.INPUT.MAX_SIZE_TEST)
        height = height or width  # 0 leaves images as they are
    if trained.task == "pretraining":
        backbone = model if isinstance(model, Backbone) else model.get_submodule("backbone")
        image = next(backbone.parameters()).new_zeros(1, 3, height, width)
        madds = count_madds(backbone, image)
    else:
        madds = count_detector_madds(model, height, width)
    return Costs(count_parameters(model), madds.total(CountingRule.CORE), (height, width))
