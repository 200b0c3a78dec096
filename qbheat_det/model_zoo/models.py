# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a name stands for: a recipe, a config, a file, a model with its weights."""

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    bare_backbone,
    load_run_config,
    read_weights,
)
from qbheat_det.config import get_config_path, load_config
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .index import PREFIX, find_entry, list_entries
from .places import fetch


def list_names(pattern: str = "*") -> list[str]:
    """Returns the names that match a shell pattern such as ``"retinanet/*"``, in their order."""
    return [entry.name for entry in list_entries(pattern)]


def get_config_file(name: str) -> str:
    """Returns the path of the YAML that an entry was trained by; nothing is fetched.

    Raises:
        UserError: there is no such entry, or the package has no such config.
    """
    return get_config_path(find_entry(name).config)


def get_config(name: str, *, trained: bool = True) -> CfgNode:
    """Returns the config of an entry.

    Args:
        name: of the entry.
        trained: True gives the config that travels inside the weights, with the classes of its
            data, ``MODEL.WEIGHTS`` set to the entry's address and ``MODEL.DEVICE`` to what there
            is here: what ``DefaultPredictor`` takes. False gives the recipe that it began from, as
            it is shipped: without what the entry's command overrides, and without its classes.

    Raises:
        UserError: there is no such entry, or its weights cannot be fetched.
    """
    return load_run_config(get_address(name)) if trained else load_config(get_config_file(name))


def get_address(name: str) -> str:
    """Returns what ``MODEL.WEIGHTS`` takes; nothing is fetched.

    Raises:
        UserError: there is no such entry.
    """
    return PREFIX + find_entry(name).name


def get_checkpoint(name: str) -> str:
    """Returns the path of an entry's file (``.safetensors``), fetched if need be, hash checked.

    Raises:
        UserError: there is no such entry, or no place gives the file.
    """
    return str(fetch(find_entry(name)))


def get(name: str, *, trained: bool = True, device: str | None = None) -> nn.Module:
    """Builds the model of an entry from the config inside its weights.

    Args:
        name: of the entry. Of a file that holds a backbone alone, it is the backbone.
        trained: whether to load the weights; every tensor of file and model finds its partner.
        device: "cpu" or "cuda"; None takes the GPU where there is one.

    Returns:
        The model in evaluation mode.

    Raises:
        UserError: there is no such entry or device, the weights cannot be fetched, or they do not
            fit the model that this version of the package builds.
    """
    file = get_checkpoint(name)
    cfg = load_run_config(file, device=device)
    is_bare = not bare_backbone(read_weights(file)[0])
    model: nn.Module = build_bare_backbone(cfg) if is_bare else build_model(cfg)
    model.to(torch.device(cfg.MODEL.DEVICE))
    if trained:
        names = () if is_bare else cfg.MODEL.CLASS_NAMES
        ExactCheckpointer(model, class_names=names).load(file)
    return model.eval()
