# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former in timm: ``timm.create_model("mobile_former_285m", features_only=True)``.

Importing this module registers the paper's three sizes with timm, and as ``timm:<name>`` with
Detectron2. ``pretrained=True`` loads the encoder ``distill/285M`` of the model zoo, and is an error
for the other sizes, as for any timm model without weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from detectron2.utils.file_io import PathManager
from timm.layers import create_classifier
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from .mobile_former import MobileFormer
from .mobile_former_archs import MOBILE_FORMER_ARCHS
from .timm_backbone import register_timm_backbone

_ARCHS = {
    "mobile_former_285m": "285M",
    "mobile_former_1_0g": "1.0G",
    "mobile_former_3_7g": "3.7G",
}
_WEIGHTS = {"mobile_former_285m": "qbheat://distill/285M"}


class TimmMobileFormer(nn.Module):
    """A ``MobileFormer``, the child ``encoder``, with the methods of timm's models.

    timm's classifiers read one feature map. Therefore ``forward_features`` concatenates the first
    token to each position of the expanded map. Average pooling returns the token unchanged.
    """

    def __init__(
        self,
        *,
        arch: str,
        num_classes: int = 0,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        """Takes a name in ``MOBILE_FORMER_ARCHS``, and the arguments of timm's models."""
        super().__init__()
        widths = MOBILE_FORMER_ARCHS[arch]
        shapes = widths.output_shapes()
        *self._map_names, self._expanded_name, _ = shapes
        self._arguments = {"arch": arch, "in_channels": in_chans, "drop_path": drop_path_rate}
        self.encoder = MobileFormer(**self._arguments, out_features=list(shapes))
        self.drop_rate = drop_rate
        self.in_chans = in_chans
        self.num_features = widths.expanded + widths.token_dim
        self.head_hidden_size = self.num_features
        self.feature_info = []
        for index, name in enumerate(self._map_names):
            shape = shapes[name]
            self.feature_info.append(
                {
                    "num_chs": shape.channels,
                    "reduction": shape.stride,
                    "module": f"encoder.stages.{index}",
                }
            )
        self.reset_classifier(num_classes, global_pool)

    def forward(self, x: Tensor) -> Tensor:
        """Takes normalized images (N, 3, H, W). Returns logits (N, K), or vectors if K is 0."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns the map (N, C + D, H / 16, W / 16) that the classifier reads."""
        return self._last_map(self.encoder(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Takes the output of ``forward_features``. Returns what ``forward`` returns.

        ``pre_logits`` leaves out the classifier.
        """
        x = F.dropout(self.global_pool(x), self.drop_rate, self.training)
        if pre_logits:
            return x
        return self.classifier(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the output of ``forward_features`` and the maps of ``indices``, finest first."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt of Mobile-Former is NCHW, not {output_fmt}")
        taken, _ = feature_take_indices(len(self._map_names), indices)
        outputs = self.encoder(x)
        maps = [outputs[self._map_names[index]] for index in sorted(set(taken))]
        if intermediates_only:
            return maps
        return self._last_map(outputs), maps

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] | None = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Removes the layers after the last of the maps ``indices``. Returns these as a list."""
        taken, last = feature_take_indices(len(self._map_names), indices)
        self._map_names = self._map_names[: last + 1]
        weights = self.encoder.state_dict()
        encoder = MobileFormer(**self._arguments, out_features=self._map_names)
        encoder.load_state_dict({name: weights[name] for name in encoder.state_dict()})
        self.encoder = encoder.to(self.encoder.tokens.device).train(self.training)
        self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """Returns the last layer."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the last layer. None keeps the pooling."""
        if global_pool is None:
            global_pool = str(self.global_pool.pool_type)
        self.num_classes = num_classes
        self.global_pool: nn.Module
        self.classifier: nn.Module
        self.global_pool, self.classifier = create_classifier(
            self.num_features, num_classes, pool_type=global_pool
        )

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay: the tokens."""
        return {"encoder.tokens"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Returns patterns of the names in each layer, for timm's ``layer_decay``.

        A layer is a block, or a stage if ``coarse``.
        """
        depth = r"\.(\d+)\." if coarse else r"\.(\d+)\.(\d+)\."
        return {
            "stem": r"^encoder\.(?:stem\.|tokens$)",
            "blocks": r"^encoder\.stages" + depth,
            "expand": r"^encoder\.(?:expand|last_bridge)\.",
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Raises an ``AssertionError`` if ``enable``, as timm's models without checkpointing do."""
        assert not enable, "gradient checkpointing not supported"

    def _last_map(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the expanded map with the first token; if it is pruned, the last map."""
        if self._expanded_name not in outputs:
            return outputs[self._map_names[-1]]
        x = outputs[self._expanded_name]
        token = outputs["tokens"][:, 0, :, None, None].expand(-1, -1, *x.shape[2:])
        return torch.cat([x, token], dim=1)


def _make_entry(name: str) -> Callable[..., nn.Module]:
    """Returns the function that timm calls to create the model ``name``."""

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
        if pretrained and name in _WEIGHTS:
            overlay.setdefault("file", PathManager.get_local_path(_WEIGHTS[name]))
        return build_model_with_cfg(
            TimmMobileFormer,
            name,
            pretrained,
            pretrained_cfg_overlay=overlay,
            pretrained_filter_fn=_find_encoder,
            feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
            arch=_ARCHS[name],
            **kwargs,
        )

    create.__name__ = name
    return create


def _find_encoder(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Returns the tensors of a file under the names of a ``TimmMobileFormer``.

    The model zoo's files name the tensors of the encoder without a prefix.
    """
    if any(name.startswith("encoder.") for name in state):
        return state
    names = [name for name in model.state_dict() if name.startswith("encoder.")]
    return {name: state[name.removeprefix("encoder.")] for name in names}


_NETWORK = {
    "input_size": (3, 256, 256),
    "pool_size": (16, 16),
    # As the weights have no classifier, a model has none unless ``num_classes`` is given.
    "num_classes": 0,
    "first_conv": "encoder.stem",
    "classifier": "classifier",
    "license": "apache-2.0",
    "paper_name": "Self-Supervised Learning based on Heat Equation",
    "paper_ids": "arXiv:2211.13228",
}
# timm reads this when a model is registered. The names are of weights, with timm's tag.
default_cfgs = generate_default_cfgs(
    {
        "mobile_former_285m.distill": {**_NETWORK, "file": _WEIGHTS["mobile_former_285m"]},
        "mobile_former_1_0g.untrained": _NETWORK,
        "mobile_former_3_7g.untrained": _NETWORK,
    }
)
for _name in _ARCHS:
    register_model(_make_entry(_name))
    register_timm_backbone(_name)
