# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Configs, files and models by name, as in Detectron2's ``model_zoo``."""

from dataclasses import dataclass

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    LoadReport,
    holds_backbone_alone,
    load_run_config,
)
from qbheat_det.config import get_config_path, load_config, refuse_bad_values
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .index import PREFIX, find_entry, list_entries
from .sources import fetch


@dataclass(frozen=True)
class TrainedModel:
    """A model or bare backbone in evaluation mode, filled from a file if there is a ``report``."""

    model: nn.Module
    cfg: CfgNode
    report: LoadReport | None


def list_names(pattern: str = "*") -> list[str]:
    """Returns the names that match a shell pattern such as ``"retinanet/*"``, sorted."""
    return [entry.name for entry in list_entries(pattern)]


def get_config_file(name: str) -> str:
    """Returns the path of the YAML that trained an entry; downloads nothing."""
    return get_config_path(find_entry(name).config)


def get_config(name: str, *, trained: bool = True) -> CfgNode:
    """Returns the config inside an entry's weights, with ``MODEL.WEIGHTS`` set to them.

    Without ``trained``, the recipe as shipped, without what the entry's command overrides. Raises a
    ``UserError`` if there is no such entry, or its weights cannot be downloaded.
    """
    return load_run_config(get_address(name)) if trained else load_config(get_config_file(name))


def get_address(name: str) -> str:
    """Returns the value for ``MODEL.WEIGHTS``; downloads nothing."""
    return PREFIX + find_entry(name).name


def get_checkpoint(name: str) -> str:
    """Returns the path of an entry's ``.safetensors``, downloaded if necessary, hash checked."""
    return str(fetch(find_entry(name)))


def get(name: str, *, trained: bool = True, device: str | None = None) -> nn.Module:
    """Builds the model of an entry from the config inside its weights, in evaluation mode.

    If the file holds a backbone only, the model is the backbone. Without ``trained``, it keeps its
    random initialisation. A ``UserError`` if there is no such entry or device, or a download fails.
    """
    return open_trained(get_checkpoint(name), trained=trained, device=device).model


def open_trained(weights: str, *, trained: bool = True, device: str | None = None) -> TrainedModel:
    """Builds the model of a file or address from its config, and fills it exactly.

    ``device`` is by default the GPU if there is one. Raises a ``UserError`` if the file or its
    config is not valid, or they do not fit each other.
    """
    cfg = load_run_config(weights, device=device)
    is_bare = holds_backbone_alone(weights)
    with refuse_bad_values(f"the config of '{weights}'"):
        model: nn.Module = build_bare_backbone(cfg) if is_bare else build_model(cfg)
    model.to(torch.device(cfg.MODEL.DEVICE))
    checkpointer = ExactCheckpointer(model, class_names=() if is_bare else cfg.MODEL.CLASS_NAMES)
    if trained:
        checkpointer.load(weights)
    return TrainedModel(model.eval(), cfg, checkpointer.report)
