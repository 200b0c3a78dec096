# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MoCo-v2: pre-training by telling the other view of an image from the keys of earlier batches.

Papers: "Momentum Contrast for Unsupervised Visual Representation Learning", He et al.,
arXiv:1911.05722, and "Improved Baselines with Momentum Contrastive Learning", Chen et al.,
arXiv:2003.04297. What the QB-Heat paper changed of it for Mobile-Former it does not say.

What differs: keys enter the queue, and the copy follows, at the end of a step in place of the
middle and the beginning of the next, which gives the same numbers; batches of one process can be
normalised in groups (``modeling/pretrain/batch_shuffle.py``).

That keys of earlier batches are of other images holds for a queue well below the training set: of
N images, each once an epoch, a queue of K <= N keys holds one of the query's own image for a share
of (K / N)^2 / 2 of the queries. It is 0.1 % for the papers' 65,536 keys of ImageNet.
"""

import logging
from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import (
    FeatureQueue,
    MomentumCopy,
    PretrainingModel,
    ProjectionHead,
    check_equal_shares,
    draw_order,
    embed_in_groups,
    embed_shuffled,
    embedding_from_config,
    info_nce,
    similarity_logits,
)

logger = logging.getLogger(__name__)


@META_ARCH_REGISTRY.register()
class MoCo(PretrainingModel):
    """An encoder of queries, a copy that follows it and encodes keys, a queue of earlier keys.

    Any Detectron2 backbone serves as encoder. The loss is a mean over images. With the statistics
    of BatchNorm fixed, gradients of several processes are those of one with the joined batch; with
    statistics of the batch, those of P processes with g ``norm_groups`` each are those of one with
    P g.
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
        in_feature: str,
        image_size: int,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        temperature: float = 0.2,
        momentum: float = 0.999,
        norm_groups: int = 1,
    ) -> None:
        """
        Args:
            backbone: what is to be trained; gives ``in_feature``.
            head: from the backbone's outputs to what is compared.
            queue: of keys as wide as what ``head`` gives.
            in_feature: name of the backbone's map.
            image_size: S, rows and columns of the views.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.
            temperature: what similarities are divided by, above 0.
            momentum: what the encoder of keys keeps of itself in each step, in [0, 1].
            norm_groups: parts of each process's batch with statistics of their own.

        Raises:
            ValueError: the backbone has no such map, or a number makes no sense.
        """
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=head.in_features,
            image_size=image_size,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
        )
        if temperature <= 0 or norm_groups < 1:
            raise ValueError(
                "MODEL.MOCO.TEMPERATURE must be above 0 and MODEL.MOCO.NORM_GROUPS at least 1, not "
                f"{temperature} and {norm_groups}"
            )
        self.head = head
        self.momentum_backbone = MomentumCopy(backbone, momentum=momentum)
        self.momentum_head = MomentumCopy(head, momentum=momentum)
        self.queue = queue
        self.temperature = temperature
        self.norm_groups = norm_groups
        self.metrics: dict[str, Tensor] = {}
        """"contrast_accuracy" of the last training batch, in per cent, 0-d: how many queries are
        more similar to their own key than to any in the queue."""
        self.register_load_state_dict_post_hook(_copy_what_was_not_loaded)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.MOCO
        check_sizes(node.QUEUE_SIZE, cfg.SOLVER.IMS_PER_BATCH)
        check_equal_shares(cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size())
        check_groups(
            node.NORM_GROUPS,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            processes=comm.get_world_size(),
            accumulate=cfg.SOLVER.ACCUMULATE,
        )
        return {
            **embedding_from_config(cfg, node),
            "queue": FeatureQueue(size=node.QUEUE_SIZE, dim=node.DIM),
            "temperature": node.TEMPERATURE,
            "momentum": node.MOMENTUM,
            "norm_groups": node.NORM_GROUPS,
        }

    def forward(self, batched_inputs: list[dict[str, Any]], order: Tensor | None = None) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S), the view that the query is
                of, and in training "image_key" (3, S, S), that of the key.
            order: of the images of all processes, see ``embed_shuffled``; drawn by default.

        Returns:
            {"loss_contrastive"}, 0-d, in training; else a list with a dict for each image:
            "embedding" (D,), of length 1, by the encoder of queries.

        Raises:
            UserError: an image has another size, or there is one view.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            return [{"embedding": row} for row in self.embed(images)]
        key_images = self.preprocess_image(batched_inputs, key="image_key")
        if order is None:
            order = draw_order(len(images), device=self.device)
        queries = embed_in_groups(self.embed, images, self.norm_groups)
        all_keys = embed_shuffled(self.embed_keys, key_images, order, self.norm_groups)
        self.queue.hold(all_keys)
        keys = all_keys.unflatten(0, (-1, len(images)))[comm.get_rank()]
        logits = similarity_logits(queries, keys, self.queue.keys, temperature=self.temperature)
        finds_own = logits.detach().argmax(dim=1) == 0
        self.metrics = {"contrast_accuracy": 100 * finds_own.float().mean()}
        return {"loss_contrastive": info_nce(logits).mean()}

    def check_num_images(self, num_images: int) -> None:
        """Warns where more than 3 % of the queries find their own image among earlier keys."""
        size = len(self.queue.keys)
        if 4 * size > num_images:
            share = share_with_own_key(size, num_images)
            logger.warning(
                f"MODEL.MOCO.QUEUE_SIZE {size:,} is more than a quarter of the {num_images:,} "
                f"images: for {share:.0%} of the queries it holds another view of their own image, "
                "which is then taken for one of another image"
            )

    def embed(self, images: Tensor) -> Tensor:
        """From images (N, 3, S, S) to what is compared, (N, D), by the encoder of queries."""
        embedded: Tensor = self.head(self.backbone(images))
        return embedded

    def embed_keys(self, images: Tensor) -> Tensor:
        """From images (N, 3, S, S) to what is compared, (N, D), by the copy, without gradients."""
        embedded: Tensor = self.momentum_head(self.momentum_backbone(images))
        return embedded

    def after_step(self) -> None:
        """Lets the keys of the step into the queue, and the copy follow the new weights.

        To be called once an optimizer step, however many forward passes there were.
        """
        self.queue.push_held()
        self.momentum_backbone.follow(self.backbone)
        self.momentum_head.follow(self.head)


def check_sizes(queue_size: int, batch_size: int) -> None:
    """
    Raises:
        UserError: the queue does not hold whole batches.
    """
    if queue_size < 1 or queue_size % batch_size:
        nearest = max(1, round(queue_size / batch_size)) * batch_size
        raise UserError(
            f"MODEL.MOCO.QUEUE_SIZE {queue_size} is no multiple of SOLVER.IMS_PER_BATCH "
            f"{batch_size}, so that keys would not all stay equally long: set it to {nearest}"
        )


def share_with_own_key(queue_size: int, num_images: int) -> float:
    """Returns for how many queries the queue holds a key of their image, each once an epoch."""
    epochs = min(queue_size / num_images, 2.0)
    return epochs**2 / 2 if epochs <= 1 else 1 - (2 - epochs) ** 2 / 2


def check_groups(groups: int, *, batch_size: int, processes: int, accumulate: int) -> None:
    """
    Args:
        groups: parts of a micro-batch with statistics of their own.
        batch_size: images of a step, over all processes and micro-batches.
        processes: that share them.
        accumulate: micro-batches of a process.

    Raises:
        UserError: some group would be a single image, whose query and key share what grouping is to
            keep apart.
    """
    smallest = batch_size // processes // accumulate
    if groups > 1 and smallest // groups < 2:
        raise UserError(
            f"MODEL.MOCO.NORM_GROUPS {groups} leaves groups of one image of the {smallest} that a "
            "process sees at once, so that a query and its key would have the same statistics: set "
            f"it to {max(1, smallest // 2)}, or raise SOLVER.IMS_PER_BATCH"
        )


def _copy_what_was_not_loaded(model: "MoCo", incompatible: Any) -> None:
    """Starts from weights of another model: the copy begins as what it copies."""
    missing = set(incompatible.missing_keys)
    for name, module in (("momentum_backbone", model.backbone), ("momentum_head", model.head)):
        copied: MomentumCopy = getattr(model, name)
        if missing.issuperset(f"{name}.{key}" for key in copied.state_dict()):
            copied.become(module)
