# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training by the Wasserstein dependency between two areas of an image.

Paper: "Wasserstein Dependency Measure for Representation Learning", Ozair et al.,
arXiv:1903.11780. Mutual information compares the joint distribution of two areas with the product
of their marginals by the KL divergence; here the Wasserstein distance takes its place, by its dual
with a Lipschitz critic. What the paper leaves open, and where this deviates from it:

- the areas are two quarters of an image, as QB-Heat (arXiv:2211.13228) cuts it;
- distances are those between features, not between images, so that the penalty on the critic's
  slope goes through the critic alone. The encoder could then make any distance large by large
  features: all have the length ``radius``, and no two pairs are further apart than its
  2 sqrt(2)-fold;
- encoder and critic maximise the same estimate, in the same step of the same optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from detectron2.utils import comm
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import (
    AreaPairs,
    DependencyLoss,
    LipschitzCritic,
    PretrainingModel,
    ProjectionHead,
    check_equal_shares,
    dual_distance,
    embedding_from_config,
    find_map,
)


@dataclass(frozen=True)
class DependencyDraw:
    """What is random in training on N images."""

    areas: AreaPairs  # two of each image
    mixing: Tensor  # (N,) in [0, 1], of two pairs the share of the own one, where slopes are taken


@META_ARCH_REGISTRY.register()
class WassersteinDependency(PretrainingModel):
    """An encoder of two quarters of each image, and a critic that tells whether they are of one.

    Every area is compared with every other of the batch, over all processes together. With the
    statistics of BatchNorm fixed or synchronised, the loss is that of one process with the joined
    batch; areas and points on lines are drawn by each process for its own images. With statistics
    of each process, the two areas of an image share theirs and strangers of other processes do not,
    which gives away what belongs together: P > 1 processes want a ``NORM`` that synchronises. With
    micro-batches, a batch is what they join at once.

    The encoder's convolutions take half of what whole images would cost. The critic's part grows
    with the square of the batch: N images are N x N x ``CRITIC_DIM`` values in each of its layers.
    """

    pretrain_only_modules = ("head", "critic")
    held_out_loss = False

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        head: ProjectionHead,
        critic: LipschitzCritic,
        loss: DependencyLoss,
        in_feature: str,
        radius: float,
        image_size: int,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        """
        Args:
            backbone: what is to be trained; gives ``in_feature``.
            head: from the backbone's outputs to what is compared, (N, D), of length 1.
            critic: of pairs of these, brought to another length.
            loss: of the critic's values.
            in_feature: name of the backbone's map.
            radius: length of what is compared.
            image_size: S, rows and columns of the images.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.

        Raises:
            ValueError: the backbone has no such map, or half an image does not fall into its
                positions, or the radius is not positive.
        """
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=head.in_features,
            image_size=image_size,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
        )
        find_map(backbone.output_shape(), in_feature, image_size, multiple=2)
        if not radius > 0:
            raise ValueError(f"MODEL.WASSERSTEIN.RADIUS is above 0, not {radius}")
        self.head = head
        self.critic = critic
        self.loss = loss
        self.radius = radius
        self.metrics: dict[str, Tensor] = {}
        """Of the last batch in training, 0-d each: "distance", the dual estimate of the Wasserstein
        distance, at the optimum of the dual form too large by its share of twice the penalty's
        weight, in the contrastive form by no known factor; "slope", the mean of the critic's."""

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.WASSERSTEIN
        check_equal_shares(cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size())
        return {
            **embedding_from_config(cfg, node, multiple=2),
            "critic": LipschitzCritic(dim=node.DIM, hidden_dim=node.CRITIC_DIM),
            "loss": DependencyLoss(form=node.FORM, penalty_weight=node.PENALTY_WEIGHT),
            "radius": node.RADIUS,
        }

    def forward(
        self, batched_inputs: list[dict[str, Any]], drawn: DependencyDraw | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S).
            drawn: what is random in training; by default that of ``draw``.

        Returns:
            {"loss_dependency", "loss_penalty"}, 0-d each, in training; else a list with a dict for
            each image: "embedding" (D,), of length ``radius``, of the whole image.

        Raises:
            UserError: images have another size, or there is only one, in training.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            return [{"embedding": row} for row in self.embed(images)]
        drawn = drawn or self.draw(len(images))
        x, y = self.embed(torch.cat(drawn.areas.crop(images))).chunk(2)
        all_x, all_y, partners = gather_pairs(x, y)
        if len(all_y) < 2:
            raise UserError(
                "the Wasserstein dependency compares each image with others, but a step has one: "
                "raise SOLVER.IMS_PER_BATCH, or lower SOLVER.ACCUMULATE"
            )
        values = self.critic(x[:, None], all_y[None])
        # Neighbours in the batch are strangers: it was drawn at random.
        strangers = (all_x.roll(-1, 0)[partners], all_y.roll(-2, 0)[partners])
        slopes = self.critic.slopes((x, y), strangers, drawn.mixing)
        self.metrics = {
            "distance": dual_distance(values.detach(), partners),
            "slope": slopes.detach().mean(),
        }
        return self.loss(values, partners, slopes)

    def draw(self, num_images: int) -> DependencyDraw:
        """Draws two areas of each of N images, and where between two pairs slopes are measured."""
        areas = AreaPairs.draw(num_images, device=self.device)
        return DependencyDraw(areas, torch.rand(num_images, device=self.device))

    def embed(self, images: Tensor) -> Tensor:
        """From images or areas of them, (N, 3, H, W), to what is compared, (N, D)."""
        embedded: Tensor = self.radius * self.head(self.backbone(images))
        return embedded


def gather_pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Brings the pairs of all processes together; gradients find the way back.

    Args:
        x: (N, D).
        y: (N, D), equally many on each process.

    Returns:
        All x and all y, (M, D), and at which of them those of this process stand, (N,).
    """
    here = torch.arange(len(x), device=x.device)
    if comm.get_world_size() == 1:
        return x, y, here
    all_x, all_y = torch.cat(all_gather(torch.cat([x, y], dim=1))).chunk(2, dim=1)
    return all_x, all_y, here + comm.get_rank() * len(x)
