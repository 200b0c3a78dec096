# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Monitors the similarity of the tokens of each block during training.

The tokens of a Mobile-Former can collapse to the same vectors for all images. The loss still falls,
but the tokens then contain no information about the image.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from qbheat_det.modeling.contracts import (
    SupportsTokenBlocks,
    get_backbone,
    get_encoder,
    get_token_parameters,
)

from .hooks import TrainingRun, is_due

logger = logging.getLogger(__name__)
COLLAPSED = 0.995
"""Mean cosine over images above which tokens count as collapsed."""
_READINGS = 5  # consecutive collapsed readings after the warm-up before the warning


class TokenMonitor(HookBase):
    """Logs the mean cosines of each block's tokens, and warns once if most blocks collapse.

    "cosine_over_images/<block>" compares one token between the images of a micro-batch, and
    "cosine_over_tokens/<block>" the tokens of one image. Blocks have hooks only in steps that are
    logged.
    """

    trainer: TrainingRun

    def __init__(self, blocks: Mapping[str, nn.Module], *, period: int, warmup: int) -> None:
        """
        Args:
            blocks: blocks by name, each returning a feature map and tokens (N, M, D).
            period: iterations between two readings, at least 1.
            warmup: first iterations, in which collapse is ignored.
        """
        self._blocks = blocks
        self._period = period
        self._warmup = warmup
        self._handles: list[RemovableHandle] = []
        self._read: dict[str, Tensor] = {}
        self._collapsed = Counter[str]()  # consecutive readings, by block
        self._has_warned = False

    def before_step(self) -> None:
        """Adds hooks to the blocks if a reading is due."""
        if is_due(self.trainer, self._period):
            for name, block in self._blocks.items():
                self._handles.append(block.register_forward_hook(partial(self._keep, name)))

    def after_step(self) -> None:
        """Logs the readings and removes the hooks."""
        self._remove_hooks()
        if not self._read:
            return
        values = torch.stack([*self._read.values()]).tolist()
        found = dict(zip(self._read, values, strict=True))
        self._read = {}
        kinds = ("cosine_over_images", "cosine_over_tokens")
        scalars = {
            f"{kind}/{name}": value
            for name, pair in found.items()
            for kind, value in zip(kinds, pair, strict=True)
            if math.isfinite(value)  # nan for a single image or token
        }
        self.trainer.storage.put_scalars(smoothing_hint=False, **scalars)
        if self.trainer.iter >= self._warmup:
            self._warn_of_collapse({name: over_images for name, (over_images, _) in found.items()})

    def after_train(self) -> None:
        """Removes hooks that remain after an error in a step."""
        self._remove_hooks()

    def _keep(
        self, name: str, block: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]
    ) -> None:
        # Only the first micro-batch of a step counts.
        if block.training and name not in self._read:
            self._read[name] = mean_cosines(output[1].detach())

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _warn_of_collapse(self, over_images: Mapping[str, float]) -> None:
        for name, cosine in over_images.items():
            self._collapsed[name] = self._collapsed[name] + 1 if cosine > COLLAPSED else 0
        names = [name for name, count in self._collapsed.items() if count >= _READINGS]
        # Tokens of the first blocks depend little on the image in any network.
        if 2 * len(names) > len(self._blocks) and not self._has_warned:
            self._has_warned = True
            now = self.trainer.cfg.SOLVER.TOKEN_MULTIPLIER
            logger.warning(
                f"The tokens of {len(names)} of {len(self._blocks)} blocks have become the same "
                f"for all images (cosine above {COLLAPSED}; first in '{names[0]}'): a lower "
                f"SOLVER.TOKEN_MULTIPLIER than {now:g}, such as {now / 10:g}, can keep them apart"
            )


@torch.no_grad()
def mean_cosines(tokens: Tensor) -> Tensor:
    """Returns the mean cosine over pairs of images and over pairs of tokens, (2,).

    A mean is nan if there is only one image or token.

    Args:
        tokens: (N, M, D).
    """
    directions = F.normalize(tokens.float(), dim=2)
    means = []
    for dim in (0, 1):
        # The squared length of a sum of n unit vectors is n plus twice the cosines of all pairs.
        count = directions.shape[dim]
        lengths = directions.sum(dim=dim).square().sum(dim=-1)
        pairs = count * (count - 1)
        means.append((lengths.mean() - count) / pairs if pairs else lengths.new_tensor(math.nan))
    return torch.stack(means)


def build_token_monitor(cfg: CfgNode, model: nn.Module) -> TokenMonitor | None:
    """Returns a monitor if ``SOLVER.LOG_TOKENS`` is set and the model trains tokens, else None.

    Returns None with ``SOLVER.COMPILE``, because a hook on a compiled block recompiles it.
    """
    backbone = get_backbone(model)
    if backbone is None or cfg.SOLVER.COMPILE or not cfg.SOLVER.LOG_TOKENS:
        return None
    encoder = get_encoder(backbone)
    trained = any(parameter.requires_grad for parameter in get_token_parameters(encoder))
    if not (trained and isinstance(encoder, SupportsTokenBlocks)):
        return None
    return TokenMonitor(
        encoder.token_blocks(), period=cfg.SOLVER.LOG_PERIOD, warmup=cfg.SOLVER.WARMUP_ITERS
    )
