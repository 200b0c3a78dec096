# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former with the methods that timm's models have.

The network is ``MobileFormer`` itself, with its names of tensors; what timm asks for besides stands
around it. Conventions: timm 1.0.31, as its own tests have them of every model.
"""

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from timm.layers import create_classifier
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.checkpoint.timm_weights import load_into_timm_model
from qbheat_det.modeling.backbone import MobileFormer, MobileFormerArch


class TimmMobileFormer(MobileFormer):
    """A Mobile-Former that gives class scores, and whose stages timm can ask for.

    The classifier is the package's linear decoder: the expanded map averaged over positions and,
    behind it, the first token. timm wants one map of a network, from which the head goes on; so
    ``forward_features`` sets the first token beside every position, (N, C + D, H / 16, W / 16), and
    any pooling over positions leaves it as it is.

    Attributes:
        num_classes: K; 0 where there is no classifier.
        num_features: C + D.
        head_hidden_size: the same.
        feature_info: "num_chs", "reduction" and "module" of the four stages.
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
        """
        Args:
            arch: widths.
            num_classes: K; 0 leaves the classifier out.
            in_chans: channels of the image.
            global_pool: "avg", "max", "avgmax", "catavgmax", or "" for none.
            drop_rate: dropout before the classifier.
            drop_path_rate: see ``drop_path`` of ``MobileFormer``.
            norm: name for ``detectron2.layers.get_norm``.
        """
        stages = [f"s{2 ** (i + 1)}" for i in range(1 + _count_downs(arch))]
        super().__init__(
            arch=arch,
            out_features=[*stages, f"{stages[-1]}_expanded", "tokens"],
            norm=norm,
            drop_path=drop_path_rate,
            in_channels=in_chans,
        )
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.grad_checkpointing = False
        self.num_features = self.head_hidden_size = arch.expanded + arch.token_dim
        channels, strides = self._out_feature_channels, self._out_feature_strides
        self.feature_info = [
            {"num_chs": channels[name], "reduction": strides[name], "module": f"stages.{index}"}
            for index, name in enumerate(stages)
        ]
        self.reset_classifier(num_classes, global_pool)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """From normalised images (N, 3, H, W) to logits (N, K)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns (N, C + D, H / 16, W / 16): the expanded map, with the first token beside it."""
        return self._last_map(*list(self.run_stages(x))[-1][1:])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """From what ``forward_features`` gives to logits, or with ``pre_logits`` to their input."""
        x = F.dropout(self.global_pool(x), self.drop_rate, self.training)
        logits: Tensor = x if pre_logits else self.classifier(x)
        return logits

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """
        Args:
            x: (N, 3, H, W), normalised images.
            indices: of the stages to take, or how many of the last ones; None takes all.
            norm: without effect, there is no last norm.
            stop_early: run no stage behind the last one that is taken.
            output_fmt: "NCHW".
            intermediates_only: leave out what ``forward_features`` gives.

        Returns:
            The maps of the stages, before them what ``forward_features`` gives.

        Raises:
            ValueError: another format, or the network is to stop early and to be run to its end.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"maps of Mobile-Former are NCHW, not {output_fmt}")
        if stop_early and not intermediates_only:
            raise ValueError("stop_early goes with intermediates_only")
        taken, last = self._take(indices)
        stages = self.run_stages(x)
        if stop_early:
            stages = itertools.islice(stages, last + 1)
        run = list(stages)
        # In the order of the network, each once, as timm's own models give them.
        maps = [run[index][1] for index in sorted(set(taken))]
        return maps if intermediates_only else (self._last_map(*run[-1][1:]), maps)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] | None = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Cuts off what lies behind the stages asked for; returns their indices.

        Args:
            indices: as in ``forward_intermediates``.
            prune_norm: cut the final convolution, which stands where others have a last norm.
            prune_head: cut classifier and pooling.
        """
        taken, last = self._take(indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.expand = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """Returns the last layer."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Sets a new last layer for other classes.

        Args:
            num_classes: K; 0 for none.
            global_pool: as in the constructor; None leaves it as it is.
        """
        self.num_classes = num_classes
        pool = str(self.global_pool.pool_type) if global_pool is None else global_pool
        own = self.tokens
        self.global_pool: nn.Module
        self.global_pool, self.classifier = create_classifier(
            self.num_features, num_classes, pool_type=pool, device=own.device, dtype=own.dtype
        )
        if num_classes:  # as the linear decoder
            nn.init.normal_(self.classifier.weight, std=0.01)
            nn.init.zeros_(self.classifier.bias)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keeps no block's insides for the backward pass, but computes them a second time.

        Gradients are the same. As everywhere in timm, BatchNorm then counts each batch twice in its
        running statistics.
        """
        self.grad_checkpointing = enable

    def run_block(
        self, block: nn.Module, x: Tensor, tokens: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ``MobileFormer.run_block``."""
        if not self.grad_checkpointing or not torch.is_grad_enabled():
            return super().run_block(block, x, tokens, padding)
        return cast(tuple[Tensor, Tensor], checkpoint(block, x, tokens, padding))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters that are not weights: the global tokens."""
        return {"tokens"}

    def load_pretrained(self, path: str, prefix: str = "") -> None:
        """Loads any weights of the package: of a pre-training, a detector, a classifier.

        Args:
            path: file, or an address such as "qbheat://NAME".
            prefix: without meaning here; timm's loaders hand it over.

        Raises:
            UserError: the file cannot be read, or its backbone is not this one.
        """
        load_into_timm_model(self, getattr(self, "pretrained_cfg", None), path)

    def _take(self, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
        taken, last = feature_take_indices(len(self.stages), indices)
        return list(taken), last

    def _last_map(self, x: Tensor, tokens: Tensor) -> Tensor:
        if isinstance(self.expand, nn.Identity):  # cut off
            return x
        x = F.relu6(self.expand(x))
        token = tokens[:, 0, :, None, None].expand(-1, -1, *x.shape[2:])
        return torch.cat([x, token], dim=1)


def _count_downs(arch: MobileFormerArch) -> int:
    return sum(block.kind == "down" for block in arch.blocks)
