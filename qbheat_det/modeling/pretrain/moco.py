# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MoCo-v2: contrastive pre-training on two views of each image, with a queue of negative keys.

Papers: "Momentum Contrast", arXiv:1911.05722, and "Improved Baselines with Momentum Contrastive
Learning", arXiv:2003.04297. The queue and the momentum encoder are updated at the end of a step
instead of within the step, with the same results.

Shuffled BatchNorm (the first paper, Sec. 3.3): if a query and its key were in batches with the same
statistics, the encoder could recognize the key from these statistics. Therefore the images of all
processes are shuffled before the key encoder. For runs with few processes, ``norm_groups`` also
splits the images of each process into groups with separate statistics.
"""

import copy
from collections.abc import Callable
from typing import Any, cast

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
from .base import PretrainingModel
from .projection_head import ProjectionHead, embedding_from_config


class MomentumCopy(nn.Module):
    """A copy of a module whose weights are a moving average of the module's weights (Eq. 2).

    The copy has no gradients. As in MoCo, its BatchNorm statistics are not averages of the module's
    statistics. They are computed from the inputs of the copy.
    """

    def __init__(self, module: nn.Module, *, momentum: float) -> None:
        """Takes the module and the momentum m in [0, 1] of the moving average."""
        super().__init__()
        check_value(0 <= momentum <= 1, "MOCO.MOMENTUM", momentum, "in [0, 1]")
        self.copied = copy.deepcopy(module).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def forward(self, *args: Any) -> Any:
        return self.copied(*args)

    @torch.no_grad()
    def follow(self, module: nn.Module) -> None:
        """Updates each weight k from the weight q of ``module``: k becomes m k + (1 - m) q."""
        # Computed as k + (1 - m)(q - k), so that equal weights stay bit-identical.
        torch._foreach_lerp_(
            list(self.copied.parameters()), list(module.parameters()), 1 - self.momentum
        )


class FeatureQueue(nn.Module):
    """A first-in, first-out queue of K keys of dimension D (Sec. 3.2).

    The keys of a step are added when the step ends, so that all micro-batches of a step use the
    same negative keys. The initial keys are random unit vectors, which are equal in all processes.
    """

    def __init__(self, *, size: int, dim: int) -> None:
        """Takes the queue size K, at least 1, and the dimension D of keys."""
        super().__init__()
        check_value(size >= 1, "MOCO.QUEUE_SIZE", size, "at least 1")
        generator = torch.Generator().manual_seed(0)
        random = F.normalize(torch.randn(size, dim, generator=generator), dim=1)
        self.register_buffer("keys", random)
        self.register_buffer("next", torch.zeros((), dtype=torch.long))
        self.keys: Tensor  # (K, D)
        self.next: Tensor  # index of the oldest key
        self._held: list[Tensor] = []  # keys of the current step

    def hold(self, keys: Tensor) -> None:
        """Stores keys (M, D) until the step ends.

        Raises a ``RuntimeError`` if a step has more keys than the queue.
        """
        self._held.append(keys.detach())
        num_held = sum(len(held_keys) for held_keys in self._held)
        if num_held > len(self.keys):
            raise RuntimeError(
                f"a step has more than the queue's {len(self.keys)} keys: MODEL.MOCO.QUEUE_SIZE is "
                "below SOLVER.IMS_PER_BATCH, or after_step is not called"
            )

    @torch.no_grad()
    def push_held(self) -> None:
        """Replaces the oldest keys of the queue by the stored keys, at the end of a step."""
        if not self._held:
            return
        keys = torch.cat(self._held)
        self._held.clear()
        # Indexed on the device, because a slice would synchronize with the GPU.
        index = (self.next + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        self.keys.index_copy_(0, index, keys.to(self.keys.dtype))
        self.next.add_(len(keys)).remainder_(len(self.keys))


def embed_in_groups(embed: Callable[[Tensor], Tensor], images: Tensor, groups: int) -> Tensor:
    """Embeds images (N, 3, H, W) as (N, D), in ``groups`` parts of about equal size.

    Each part has separate batch statistics.
    """
    parts = images.tensor_split(min(groups, len(images)))
    return torch.cat([embed(part) for part in parts])


@torch.no_grad()
def embed_shuffled(
    embed: Callable[[Tensor], Tensor], images: Tensor, order: Tensor, groups: int
) -> Tensor:
    """Embeds the images of all processes after shuffling them by ``order``.

    Args:
        embed: embeds images (n, 3, H, W) as (n, D). Called for each of ``groups`` parts.
        images: (N, 3, H, W), the images of this process. N is equal on all processes.
        order: (P * N,), a permutation of the images of P processes. The first process embeds the
            images with the first N indices, and so on.
        groups: number of parts of each process's images.

    Returns:
        (P * N, D), the embeddings of the images of all processes in the original order.
    """
    num_images = len(images)
    first = comm.get_rank() * num_images
    indices = order[first : first + num_images]  # of the images that this process embeds
    all_images = gather_over_processes(images)  # (P * N, 3, H, W)
    embeddings = embed_in_groups(embed, all_images[indices], groups)  # (N, D)
    shuffled_embeddings = gather_over_processes(embeddings)  # (P * N, D), in ``order``
    return shuffled_embeddings[order.argsort()]


@META_ARCH_REGISTRY.register()
class MoCo(PretrainingModel):
    """A query encoder, a momentum encoder for keys, and a queue of keys of previous batches.

    Any Detectron2 backbone can be the encoder. The loss is a mean over images. Training on P
    processes, each with ``norm_groups`` g, has the gradients of one process with P * g groups.
    """

    pretrain_only_modules = ("head", "momentum_backbone", "momentum_head", "queue")
    mapper_name = "two_views"
    held_out_loss = False

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        head: ProjectionHead,
        queue: FeatureQueue,
        temperature: float = 0.2,
        momentum: float = 0.999,
        norm_groups: int = 1,
        **others: Any,
    ) -> None:
        """
        Args:
            backbone: the encoder.
            head: projects the encoder's outputs to embeddings (N, D).
            queue: K keys of dimension D.
            temperature: divisor of the similarities, above 0.
            momentum: momentum in [0, 1] of the momentum encoder's weights.
            norm_groups: number of parts of each process's batch, with separate batch statistics.
            others: the other arguments of ``PretrainingModel``.
        """
        super().__init__(backbone=backbone, head_in_features=head.in_features, **others)
        check_value(temperature > 0, "MOCO.TEMPERATURE", temperature, "above 0")
        check_value(norm_groups >= 1, "MOCO.NORM_GROUPS", norm_groups, "at least 1")
        self.head = head
        self.momentum_backbone = MomentumCopy(backbone, momentum=momentum)
        self.momentum_head = MomentumCopy(head, momentum=momentum)
        self.queue = queue
        self.temperature = temperature
        self.norm_groups = norm_groups
        # "contrast_accuracy": percentage of queries for which the matching key is most similar.
        self.metrics: dict[str, Tensor] = {}
        self.register_load_state_dict_post_hook(_copy_missing_weights)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.MOCO
        check_equal_shares(cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size())
        check_batch(
            node.QUEUE_SIZE,
            node.NORM_GROUPS,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            processes=comm.get_world_size(),
            accumulate=cfg.SOLVER.ACCUMULATE,
        )
        return {
            **embedding_from_config(cfg, "MOCO"),
            "queue": FeatureQueue(size=node.QUEUE_SIZE, dim=node.DIM),
            "temperature": node.TEMPERATURE,
            "momentum": node.MOMENTUM,
            "norm_groups": node.NORM_GROUPS,
        }

    def forward(self, batched_inputs: list[dict[str, Any]], order: Tensor | None = None) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper with the query view "image" (3, S, S), and in
                training the key view "image_key" (3, S, S).
            order: permutation (P * N,) of the images of all P processes, in which the key encoder
                processes them. By default, it is random.

        Returns:
            In training, ``{"loss_contrastive": scalar}``. In evaluation, one
            ``{"embedding": (D,)}`` per image: the unit-norm output of the query encoder.

        Raises:
            UserError: an image is missing or is not S x S.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            return [{"embedding": row} for row in self.embed(images)]
        key_images = self.preprocess_image(batched_inputs, key="image_key")
        if order is None:
            order = self.draw_order(len(images))
        queries = embed_in_groups(self.embed, images, self.norm_groups)  # (N, D)
        all_keys = embed_shuffled(self.embed_keys, key_images, order, self.norm_groups)
        self.queue.hold(all_keys)
        keys_by_process = all_keys.unflatten(0, (-1, len(images)))  # (P, N, D)
        keys = keys_by_process[comm.get_rank()]  # (N, D), of the images of this process
        with torch.autocast(queries.device.type, enabled=False):
            positives = (queries * keys).sum(dim=1, keepdim=True)  # (N, 1)
            negatives = queries @ self.queue.keys.T  # (N, K)
            logits = torch.cat([positives, negatives], dim=1) / self.temperature  # (N, 1 + K)
        is_correct = logits.detach().argmax(dim=1) == 0
        self.metrics = {"contrast_accuracy": 100 * is_correct.float().mean()}
        # The matching key is in column 0.
        targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return {"loss_contrastive": F.cross_entropy(logits, targets)}  # Eq. (1)

    def draw_order(self, num_images: int) -> Tensor:
        """Draws a permutation of the images of all processes, the same on all processes.

        ``num_images`` is the number of images of each process.
        """
        order = torch.randperm(num_images * comm.get_world_size(), device=self.device)
        if comm.get_world_size() > 1:
            torch.distributed.broadcast(order, src=0)
        return order

    def embed(self, images: Tensor) -> Tensor:
        """Embeds images (N, 3, S, S) as (N, D) by the query encoder."""
        return self.head(self.backbone(images))

    def embed_keys(self, images: Tensor) -> Tensor:
        """Embeds images (N, 3, S, S) as (N, D) by the momentum encoder."""
        return self.momentum_head(self.momentum_backbone(images))

    def after_step(self) -> None:
        """Adds the step's keys to the queue and updates the momentum encoder."""
        self.queue.push_held()
        self.momentum_backbone.follow(self.backbone)
        self.momentum_head.follow(self.head)


def check_batch(
    queue_size: int, groups: int, *, batch_size: int, processes: int, accumulate: int
) -> None:
    """Raises a ``UserError`` if the queue or the groups do not fit the batch size.

    The queue size must be a multiple of the batch size, and each group must have two images.
    """
    if queue_size < 1 or queue_size % batch_size:
        raise UserError(
            f"MODEL.MOCO.QUEUE_SIZE {queue_size} is no multiple of SOLVER.IMS_PER_BATCH "
            f"{batch_size}: some keys would stay in the queue longer than others"
        )
    micro_batch = batch_size // processes // accumulate
    if groups > 1 and micro_batch // groups < 2:
        raise UserError(
            f"MODEL.MOCO.NORM_GROUPS {groups} makes groups of one image, as a process has a "
            f"micro-batch of {micro_batch}: lower it, or raise SOLVER.IMS_PER_BATCH"
        )


def _copy_missing_weights(model: MoCo, incompatible: Any) -> None:
    """Copies the encoder to the momentum encoder if the loaded weights have no momentum encoder.

    A hook that runs after ``load_state_dict``, which gives the names of missing tensors.
    """
    missing = set(incompatible.missing_keys)
    for name in ("backbone", "head"):
        momentum_copy = cast(MomentumCopy, model.get_submodule(f"momentum_{name}"))
        needed = {f"momentum_{name}.{key}" for key in momentum_copy.state_dict()}
        if needed <= missing:
            momentum_copy.copied.load_state_dict(model.get_submodule(name).state_dict())
