# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former by name: ``timm.create_model("mobile_former_285m")``.

Importing this module registers "mobile_former_285m", "mobile_former_1g" and "mobile_former_3_7g"
with timm, and under ``timm:<name>`` with Detectron2. No weights are fetched here: where there are
some, they are told of by ``qbheat_det.model_zoo.api``.
"""

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import timm
from timm.models import DefaultCfg, PretrainedCfg, build_model_with_cfg, register_model
from torch import nn

from qbheat_det.checkpoint.timm_weights import names_for_timm
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, register_timm_backbone

from .timm_mobile_former import TimmMobileFormer

TIMM_NAMES = {
    "285M": "mobile_former_285m",
    "1.0G": "mobile_former_1g",
    "3.7G": "mobile_former_3_7g",
}
"""timm's names of the three sizes, by those of ``MODEL.MOBILE_FORMER.VARIANT``."""

_SOURCES = {
    "license": "apache-2.0",
    "paper_name": "Self-Supervised Learning based on Heat Equation",
    "paper_ids": "arXiv:2211.13228",
}


def describe_weights(**changes: Any) -> dict[str, Any]:
    """Returns the ``pretrained_cfg`` of a Mobile-Former in timm's terms, with ``changes``."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (14, 14),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stem",
        "classifier": "classifier",
        **_SOURCES,
        **changes,
    }


# timm reads this when an entry point below is registered.
default_cfgs: dict[str, DefaultCfg] = {}


def _create(size: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    name = TIMM_NAMES[size]
    if pretrained and not (kwargs.get("pretrained_cfg") or kwargs.get("pretrained_cfg_overlay")):
        tags = timm.list_models(f"{name}.*", pretrained=True)
        raise UserError(
            f"'{name}' alone names no weights; there are {', '.join(tags) or 'none by name yet'}, "
            "and a file is given by pretrained_cfg_overlay={'file': …, 'custom_load': True}"
        )
    return cast(
        nn.Module,
        build_model_with_cfg(
            TimmMobileFormer,
            name,
            pretrained,
            pretrained_filter_fn=names_for_timm,
            feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
            arch=MOBILE_FORMER_ARCHS[size],
            **kwargs,
        ),
    )


def mobile_former_285m(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Mobile-Former of 285M multiply-adds at 224 x 224."""
    return _create("285M", pretrained, **kwargs)


def mobile_former_1g(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Mobile-Former of 1.0G multiply-adds at 224 x 224."""
    return _create("1.0G", pretrained, **kwargs)


def mobile_former_3_7g(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Mobile-Former of 3.7G multiply-adds at 224 x 224."""
    return _create("3.7G", pretrained, **kwargs)


_ENTRIES = (mobile_former_285m, mobile_former_1g, mobile_former_3_7g)


def add_timm_weights(weights: Mapping[str, Mapping[str, Any]]) -> None:
    """Tells timm which weights there are, in place of those that it was told of before.

    Without a tag, a model has none: its number of classes must not depend on what is published.

    Args:
        weights: entries of a ``pretrained_cfg`` by "model.tag".
    """
    for entry in _ENTRIES:
        name = entry.__name__
        tags = {
            key.partition(".")[2]: PretrainedCfg(**describe_weights(**cfg))
            for key, cfg in weights.items()
            if key.partition(".")[0] == name
        }
        default_cfgs[name] = DefaultCfg(
            tags=deque(["", *tags]),
            cfgs={"": PretrainedCfg(**describe_weights()), **tags},
            is_pretrained=bool(tags),
        )
        with warnings.catch_warnings():  # timm takes a second registration for a mistake
            warnings.filterwarnings("ignore", message=f"Overwriting {name}")
            register_model(entry)


add_timm_weights({})
for _name in TIMM_NAMES.values():
    register_timm_backbone(_name)
