# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former in timm: ``timm.create_model("mobile_former_285m")``.

``TimmMobileFormer`` adds the methods of timm's models to ``MobileFormer`` and has the same tensor
names. Importing this module registers the names in ``TIMM_NAMES`` with timm, and as
``timm:<name>`` with Detectron2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import create_classifier
from timm.models import build_model_with_cfg, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.checkpoint.mobile_former_names import load_into_timm_model, names_for_timm
from qbheat_det.modeling.backbone import (
    MOBILE_FORMER_ARCHS,
    MobileFormer,
    MobileFormerArch,
    register_timm_backbone,
)


class TimmMobileFormer(MobileFormer):
    """A Mobile-Former classifier with timm's interface.

    timm's heads take one feature map, so ``forward_features`` concatenates the first token to every
    position. Average pooling over positions then recovers the token.
    """

    def __init__(
        self,
        *,
        arch: MobileFormerArch,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm: str = "BN",
    ) -> None:
        """Takes timm's arguments. If ``num_classes`` is 0, no classifier is built."""
        outputs = list(arch.output_shapes())
        widths = {"arch": arch, "out_features": outputs, "in_channels": in_chans}
        super().__init__(**widths, norm=norm, drop_path=drop_path_rate)
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.num_features = arch.expanded + arch.token_dim
        self.head_hidden_size = arch.head_dim or self.num_features
        if arch.head_dim:
            self.neck: nn.Module = nn.Sequential(
                nn.Linear(self.num_features, arch.head_dim),
                nn.BatchNorm1d(arch.head_dim),
                nn.Hardswish(),
            )
        else:
            self.neck = nn.Identity()
        channels, strides = self._out_feature_channels, self._out_feature_strides
        self.feature_info = [
            {"num_chs": channels[name], "reduction": strides[name], "module": f"stages.{index}"}
            for index, name in enumerate(outputs[:-2])
        ]
        self.reset_classifier(num_classes, global_pool)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Takes normalized images (N, 3, H, W) and returns logits (N, K)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns (N, C + D, H / 16, W / 16): the expanded map and the first token."""
        return self._last_map(*list(self.run_stages(x))[-1][1:])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Takes the output of ``forward_features`` and returns logits, or the features that the
        last layer reads if ``pre_logits``."""
        x = self.global_pool(x)
        if not isinstance(self.neck, nn.Identity):  # only the ImageNet networks have a neck
            token_dim = self.tokens.shape[1]
            pooled, token = x[:, :-token_dim], x[:, -token_dim:]
            x = self.neck(torch.cat([F.hardswish(pooled), token], dim=1))
        x = F.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.classifier(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the output of ``forward_features`` and the feature maps of stages, as in timm."""
        if output_fmt != "NCHW":
            raise ValueError(f"maps of Mobile-Former are NCHW, not {output_fmt}")
        taken, _ = feature_take_indices(len(self.stages), indices)
        run = list(self.run_stages(x))
        maps = [run[index][1] for index in sorted(set(taken))]
        return maps if intermediates_only else (self._last_map(*run[-1][1:]), maps)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] | None = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Removes the layers after the stages in ``indices``, as in timm.

        ``prune_norm`` removes the final 1x1 convolution."""
        taken, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.expand = nn.Identity()
        if prune_head:
            self.last_bridge, self.neck = None, nn.Identity()
            self.reset_classifier(0, "")
        return list(taken)

    def get_classifier(self) -> nn.Module:
        """Returns the last layer."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the last layer, as in timm. None keeps the pooling."""
        self.num_classes = num_classes
        pool = str(self.global_pool.pool_type) if global_pool is None else global_pool
        own = self.tokens
        self.global_pool: nn.Module
        self.global_pool, self.classifier = create_classifier(
            self.head_hidden_size, num_classes, pool_type=pool, device=own.device, dtype=own.dtype
        )
        if num_classes:  # initialized as ``LinearDecoder``
            nn.init.normal_(self.classifier.weight, std=0.01)
            nn.init.zeros_(self.classifier.bias)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay: the global tokens."""
        return {"tokens"}

    def load_pretrained(self, path: str, prefix: str = "") -> None:
        """Loads weights from a file or URL of any qbheat_det model with this backbone.

        Raises a ``UserError`` if the file cannot be read, or if its backbone is different.
        """
        load_into_timm_model(self, getattr(self, "pretrained_cfg", None), path)

    def _last_map(self, x: Tensor, tokens: Tensor) -> Tensor:
        if isinstance(self.expand, nn.Identity):  # pruned
            return x
        x = F.relu6(self.expand(x))
        token = tokens[:, 0, :, None, None].expand(-1, -1, *x.shape[2:])
        return torch.cat([x, token], dim=1)


TIMM_NAMES = {
    size: "mobile_former_" + size.lower().replace(".0", "").replace(".", "_")
    for size in MOBILE_FORMER_ARCHS
}
"""timm model names by value of ``MODEL.MOBILE_FORMER.VARIANT``."""


_WITHOUT_WEIGHTS: dict[str, Any] = {
    "url": "",
    "pool_size": (14, 14),
    "interpolation": "bilinear",
    "first_conv": "stem",
    "classifier": "classifier",
    "license": "apache-2.0",
    "paper_name": "Self-Supervised Learning based on Heat Equation",
    "paper_ids": "arXiv:2211.13228",
}
"""Entries of timm's ``pretrained_cfg`` that differ from timm's defaults."""

# timm reads this when an entry point is registered.
default_cfgs = dict.fromkeys(TIMM_NAMES.values(), _WITHOUT_WEIGHTS)


def _entry_of(size: str, name: str) -> Callable[..., nn.Module]:
    num_maps = 1 + sum(block.halves for block in MOBILE_FORMER_ARCHS[size].blocks)

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build_model_with_cfg(
            TimmMobileFormer,
            name,
            pretrained,
            pretrained_filter_fn=names_for_timm,
            feature_cfg={"out_indices": tuple(range(num_maps)), "feature_cls": "getter"},
            arch=MOBILE_FORMER_ARCHS[size],
            **kwargs,
        )

    create.__name__ = name
    return create


for _size, _name in TIMM_NAMES.items():
    register_model(_entry_of(_size, _name))
    register_timm_backbone(_name)
