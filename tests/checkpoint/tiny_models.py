# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models of a few tensors with the names of real detectors."""

import timm
import torch
from torch import nn

from qbheat_det.checkpoint import WeightsInfo, save_weights

CLASSES = ("cat", "dog", "bird")


class TinyBackbone(nn.Module):
    """A convolution with its norm, and a learned token: nine tensors, one of them a counter."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.expand = nn.Linear(4, 4)


class TinyPyramid(nn.Module):
    """The same backbone below a pyramid, as Detectron2 nests it."""

    def __init__(self):
        super().__init__()
        self.bottom_up = TinyBackbone()
        self.lateral = nn.Conv2d(4, 4, 1)


class TinyDetector(nn.Module):
    """Backbone, and a decoder with MF-DETR's class layer."""

    def __init__(self, num_classes=3, *, pyramid=False, seed=0):
        super().__init__()
        self.backbone = TinyPyramid() if pyramid else TinyBackbone()
        self.decoder = nn.Module()
        self.decoder.class_embed = nn.Linear(4, num_classes + 1)
        self.decoder.bbox_embed = nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def save_detector(path, classes=CLASSES, *, seed=1):
    """Writes a detector's weights, with its classes, as safetensors; returns its state."""
    state = TinyDetector(len(classes), seed=seed).state_dict()
    save_weights(str(path), state, WeightsInfo(class_names=tuple(classes)))
    return {name: tensor.clone() for name, tensor in state.items()}


def replace_hub(patch, cache):
    """Lets timm's hub have random weights; returns the names and networks that were asked for."""
    asked = []
    create = timm.create_model

    def fetch(name, *, pretrained=False, **kwargs):
        model = create(name, pretrained=False, **kwargs)
        asked.extend([(name, model)] if pretrained else [])
        return model

    patch.setattr(timm, "create_model", fetch)
    patch.setenv("FVCORE_CACHE", str(cache))
    return asked
