# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training by maximizing the Wasserstein dependency between two areas of an image.

Paper: "Wasserstein Dependency Measure for Representation Learning", Ozair et al., arXiv:1903.11780,
in its dual form. Gradient penalty: "Improved Training of Wasserstein GANs", arXiv:1704.00028.

The areas are two quarters at corners of an image, as in QB-Heat. Let x and y be their features, of
norm ``radius``. The critic f(x, y) is a network that scores the pair. Its slope is the norm of its
gradient. Deviations from the papers (docs/objectives.md gives the reasons):

* The gradient is computed with respect to the features (x, y), not to the images, so that the
  penalty trains only the critic.
* Only slopes above 1 are penalized (arXiv:1709.08894).
* Encoder and critic are trained together, in the same step, and maximize the same estimate.
* The critic has a bilinear term.
* Each x is paired with all y of a batch, so that terms of f that depend only on x cancel.
"""

from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import configurable
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.checks import check_value

from .all_processes import check_equal_shares, gather_over_processes
from .base import PretrainingModel, find_feature_map
from .projection_head import ProjectionHead, embedding_from_config

FORMS = ("dual", "contrastive")
Pairs = tuple[Tensor, Tensor]
"""N pairs: the features x (N, D) and y (N, D)."""


class DependencyDraw(NamedTuple):
    """Random choices in training on N images. The index of a corner is 2 * row + column."""

    first: Tensor  # (N,), a corner of each image
    second: Tensor  # (N,), a different corner of each image
    mixing: Tensor  # (N,) in [0, 1], weights of the points at which slopes are computed


class LipschitzCritic(nn.Module):
    """The critic f(x, y): a network with two hidden layers and a bilinear term, in float32."""

    def __init__(self, *, dim: int, hidden_dim: int = 256) -> None:
        """Takes the dimension D of x and y, and the width of the hidden layers, at least 1."""
        super().__init__()
        check_value(hidden_dim >= 1, "WASSERSTEIN.CRITIC_DIM", hidden_dim, "at least 1")
        # The first layer of the concatenation of x and y, split into a part for x and a part for y.
        # For N x N pairs, each part is computed only N times.
        self.from_x = nn.Linear(dim, hidden_dim)
        self.from_y = nn.Linear(dim, hidden_dim, bias=False)
        self.rest = nn.Sequential(
            nn.LeakyReLU(0.2), nn.Linear(hidden_dim, hidden_dim), nn.LeakyReLU(0.2)
        )
        self.head = nn.Linear(hidden_dim, 1)
        self.interaction = nn.Parameter(torch.zeros(dim, dim))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Takes broadcastable x and y (..., D). Returns f (...), in float32 even under autocast."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            y = y.float()
            hidden = self.rest(self.from_x(x) + self.from_y(y))
            values: Tensor = self.head(hidden).squeeze(-1)
            bilinear_term = ((x @ self.interaction) * y).sum(dim=-1)
            return values + bilinear_term

    def slopes(self, joint: Pairs, others: Pairs, mixing: Tensor) -> Tensor:
        """Returns the norms (N,) of the critic's gradients at N random points.

        Each point lies on the line between two pairs of features: the i-th pair of ``joint``, whose
        quarters are from the same image, and the i-th pair of ``others``, whose quarters are from
        different images. ``mixing`` (N,) in [0, 1] is the weight of the pair of ``joint``. The
        features are detached, so the encoder gets no gradients from the slopes.
        """
        weight = mixing[:, None]  # (N, 1)
        points = []  # x and y, (N, D) each
        for joint_features, other_features in zip(joint, others, strict=True):
            point = weight * joint_features.detach().float()
            point = point + (1 - weight) * other_features.detach().float()
            points.append(point.requires_grad_())
        # Autocast would compute the gradient in half precision, and no_grad would disable it.
        with torch.autocast(mixing.device.type, enabled=False), torch.enable_grad():
            values = self(*points)  # (N,)
            gradients = torch.autograd.grad(values.sum(), points, create_graph=True)
        squared_norms = torch.cat(gradients, dim=1).square().sum(dim=1)
        # 1e-12 is added because the norm is not differentiable at a zero gradient.
        return (squared_norms + 1e-12).sqrt()


def dual_distance(values: Tensor, partners: Tensor) -> Tensor:
    """Returns the mean value of pairs from the same image, minus the mean value of all other pairs.

    Args:
        values: the critic's values (N, M) of N x M pairs.
        partners: (N,), for each row, the column of the pair from the same image.
    """
    joint = values.gather(1, partners[:, None]).squeeze(1)  # (N,)
    mean_of_others = (values.sum(dim=1) - joint) / (values.shape[1] - 1)  # (N,)
    return (joint - mean_of_others).mean()


def crop_areas(images: Tensor, corners: Tensor) -> Tensor:
    """Crops images (N, C, S, S) to the quarters (N, C, S / 2, S / 2) at ``corners`` (N,).

    The index of a corner is 2 * row + column.
    """
    half = images.shape[-1] // 2
    split = images.unflatten(-1, (2, half)).unflatten(-3, (2, half))  # (N, C, 2, half, 2, half)
    quarters = split.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (N, 4, C, half, half)
    image_indices = torch.arange(len(images), device=images.device)
    return quarters[image_indices, corners]


@META_ARCH_REGISTRY.register()
class WassersteinDependency(PretrainingModel):
    """Encodes two quarters of each image, and scores pairs of quarters by a critic.

    In each process, the critic pairs the first quarters of the N images of this process with the
    second quarters of the M images of all processes. Each hidden layer of the critic has N x M x
    ``CRITIC_DIM`` values. With several processes, use a synchronized ``NORM``. Otherwise the
    BatchNorm statistics reveal which process encoded a quarter.

    The dual form maximizes the mean of f(x, y) over pairs from the same image, minus the mean over
    pairs from different images. The contrastive form, which the paper trains, replaces the second
    mean by a log-sum-exp over all y, as in CPC.
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
        form: str = "contrastive",
        penalty_weight: float = 10.0,
        radius: float = 1.0,
        **others: Any,
    ) -> None:
        """
        Args:
            backbone: the encoder.
            head: projects the encoder's outputs to embeddings (N, D).
            critic: scores pairs of embeddings.
            form: "dual" or "contrastive".
            penalty_weight: factor on the squared excess of slopes above 1. If W is the distance,
                the slope at the optimum of the dual form is 1 + W / (2 * penalty_weight).
            radius: norm of the embeddings.
            others: the other arguments of ``PretrainingModel``.

        Raises:
            ValueError: an argument is out of range, or the feature map cannot be halved.
        """
        super().__init__(backbone=backbone, head_in_features=head.in_features, **others)
        find_feature_map(backbone.output_shape(), self.in_feature, self.image_size, multiple=2)
        check_value(form in FORMS, "WASSERSTEIN.FORM", form, f"one of {FORMS}")
        check_value(penalty_weight > 0, "WASSERSTEIN.PENALTY_WEIGHT", penalty_weight, "above 0")
        check_value(radius > 0, "WASSERSTEIN.RADIUS", radius, "above 0")
        self.head = head
        self.critic = critic
        self.form = form
        self.penalty_weight = penalty_weight
        self.radius = radius
        # "distance" is the dual estimate, and "slope" the critic's mean slope.
        self.metrics: dict[str, Tensor] = {}

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.WASSERSTEIN
        check_equal_shares(cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size())
        return {
            **embedding_from_config(cfg, "WASSERSTEIN", multiple=2),
            "critic": LipschitzCritic(dim=node.DIM, hidden_dim=node.CRITIC_DIM),
            "form": node.FORM,
            "penalty_weight": node.PENALTY_WEIGHT,
            "radius": node.RADIUS,
        }

    def forward(
        self, batched_inputs: list[dict[str, Any]], drawn: DependencyDraw | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts with "image" (3, S, S).
            drawn: random choices in training. By default, they are drawn here.

        Returns:
            In training, the scalars "loss_dependency" and "loss_penalty". In evaluation, one
            ``{"embedding": (D,)}`` of norm ``radius`` for each whole image.

        Raises:
            UserError: all processes together train on a single image.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            return [{"embedding": row} for row in self.embed(images)]
        if drawn is None:
            drawn = self.draw(len(images))
        areas = [crop_areas(images, drawn.first), crop_areas(images, drawn.second)]
        x, y = self.embed(torch.cat(areas)).chunk(2)  # (N, D) each
        all_x = gather_over_processes(x)  # (M, D)
        all_y = gather_over_processes(y)
        # For each x, the index of the y from the same image.
        partners = torch.arange(len(x), device=x.device) + comm.get_rank() * len(x)
        if len(all_y) < 2:
            raise UserError(
                "the Wasserstein dependency compares images with each other, but a step has one: "
                "raise SOLVER.IMS_PER_BATCH, or lower SOLVER.ACCUMULATE"
            )
        values = self.critic(x[:, None], all_y[None])  # (N, M)
        # Pairs from different images: x of the next image and y of the image after it. Batches are
        # in random order.
        others = (all_x.roll(-1, 0)[partners], all_y.roll(-2, 0)[partners])
        slopes = self.critic.slopes((x, y), others, drawn.mixing)
        distance = dual_distance(values.detach(), partners)
        self.metrics = {"distance": distance, "slope": slopes.detach().mean()}
        if self.form == "dual":
            loss = -dual_distance(values, partners)
        else:
            loss = F.cross_entropy(values, partners)
        penalty = self.penalty_weight * (slopes - 1).relu().square().mean()
        return {"loss_dependency": loss, "loss_penalty": penalty}

    def draw(self, num_images: int) -> DependencyDraw:
        """Draws random choices on the device. First quarters are at all corners equally often."""
        device = self.device
        # A permutation modulo 4 has all corners equally often. The shift decides which corners
        # occur once more, if the number of images is no multiple of 4.
        permutation = torch.randperm(num_images, device=device)
        shift = torch.randint(4, (), device=device)
        first = permutation + shift
        offset = torch.randint(1, 4, (num_images,), device=device)  # to a different corner
        mixing = torch.rand(num_images, device=device)
        return DependencyDraw(first=first % 4, second=(first + offset) % 4, mixing=mixing)

    def embed(self, images: Tensor) -> Tensor:
        """Embeds images, or areas of images, (N, 3, H, W), as vectors (N, D)."""
        return self.radius * self.head(self.backbone(images))
