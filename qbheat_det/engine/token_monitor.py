# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How alike the tokens of each block of an encoder are while it trains.

A Mobile-Former's tokens can become one vector that is the same for all images. The loss goes on
falling, but half of the network then says nothing about the image.
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
"""Mean cosine over images above which tokens count as the same for all of them."""
_READINGS = 5  # in a row, after the warm-up, before the warning


class TokenMonitor(HookBase):
    """Logs the mean cosines of the tokens of each block, and warns once if most collapse.

    "cosine_over_images/<block>" compares the same token of different images of a micro-batch of
    this process, "cosine_over_tokens/<block>" different tokens of the same image. Steps in between
    run without any hook on the blocks.
    """

    trainer: TrainingRun

    def __init__(self, blocks: Mapping[str, nn.Module], *, period: int, warmup: int) -> None:
        """Takes blocks by name, each of which returns a map and the tokens (N, M, D).

        ``period`` is in iterations, at least 1; the first ``warmup`` ones do not count as collapse.
        """
        self._blocks = blocks
        self._period = period
        self._warmup = warmup
        self._handles: list[RemovableHandle] = []
        self._read: dict[str, Tensor] = {}
        self._collapsed = Counter[str]()  # readings in a row, by block
        self._has_warned = False

    def before_step(self) -> None:
        """Prepares to read the tokens of this step if that is due."""
        if is_due(self.trainer, self._period):
            for name, block in self._blocks.items():
                self._handles.append(block.register_forward_hook(partial(self._keep, name)))

    def after_step(self) -> None:
        """Logs what was read."""
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
            if math.isfinite(value)  # else there is nothing to compare
        }
        self.trainer.storage.put_scalars(smoothing_hint=False, **scalars)
        if self.trainer.iter >= self._warmup:
            self._warn_of_collapse({name: over_images for name, (over_images, _) in found.items()})

    def after_train(self) -> None:
        """Removes what an error in a step has left."""
        self._remove_hooks()

    def _keep(
        self, name: str, block: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]
    ) -> None:
        # Of several calls in a step, such as those of micro-batches, the first.
        if block.training and name not in self._read:
            self._read[name] = mean_cosines(output[1].detach())

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _warn_of_collapse(self, over_images: Mapping[str, float]) -> None:
        for name, cosine in over_images.items():
            self._collapsed[name] = self._collapsed[name] + 1 if cosine > COLLAPSED else 0
        names = [name for name, count in self._collapsed.items() if count >= _READINGS]
        # Tokens of the first blocks know little of the image in any network.
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
    """Returns the mean cosines over images and over tokens, (2,), of tokens (N, M, D).

    They are those of all pairs of different images, and of different tokens; nan for one alone.
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
    """Returns the monitor that ``SOLVER.LOG_TOKENS`` asks for, where tokens are trained.

    There is none with ``SOLVER.COMPILE``: each hook on a compiled block compiles it anew.
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
