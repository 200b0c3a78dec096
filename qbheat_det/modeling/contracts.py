# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Optional attributes and methods of models, which the trainer, the data code and the tools use.

Any ``nn.Module`` that Detectron2 can build is a valid model. Each optional feature of a model is
defined here, either as a Protocol or as a function with a default for models without the attribute.
Models do not inherit from these classes. Code outside ``modeling`` reads these attributes only
through this module.

The Protocols list no parameters, buffers or child modules, because ``isinstance`` does not find
these on an ``nn.Module`` from Python 3.12 on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from detectron2.structures import ImageList
from torch import Tensor, nn

BatchedInputs = list[dict[str, Any]]
"""A batch: the dicts that a dataset mapper returns."""


@runtime_checkable
class SupportsLossNormalizers(Protocol):
    """A model that divides its losses by counts of a batch, such as the number of boxes.

    ``forward`` takes the result of ``loss_normalizers`` as an optional second argument. If it is
    omitted, ``forward`` sums the counts over processes itself. If a model does not have these
    methods, the trainer assumes that its losses are means over images.
    """

    def loss_counts(self, batched_inputs: BatchedInputs) -> Tensor:
        """Returns the counts of a batch. The trainer sums them over all micro-batches of a step."""

    def loss_normalizers(self, counts: Tensor, parts: int) -> Tensor:
        """Returns the divisors of the losses of one micro-batch.

        ``counts`` are summed over all ``parts`` micro-batches of a step.
        """


@runtime_checkable
class SupportsAfterStep(Protocol):
    """A model that updates state between steps, such as a queue of features."""

    def after_step(self) -> None:
        """Updates the state. Called after each optimizer step, even if the step was skipped."""


TILE = "tile"
"""Key of a tile's dict. Its value is (x, y, width, height) in pixels of the upright image."""

ANNOTATED_CLASSES = "annotated_classes"
"""Key of a labelled image's dict. Its value is a sequence of contiguous class ids.

All objects of these classes are labelled in the image, so the rest of it is background for them.
Objects of other classes may lack labels. Without this key, all objects are labelled.
"""


def learns_partial_labels(model: type | object) -> bool:
    """Returns whether a model or class reads ``ANNOTATED_CLASSES`` (its attribute of this name)."""
    return bool(getattr(model, "learns_partial_labels", False))


UNLABELLED = "unlabelled"
"""Key of a labelled image's dict. Its value is a list of dicts of unlabelled images."""

STRONG = "strong"
"""Key of an unlabelled image's dict. Its value is the strong view, as pixels or features."""

PSEUDO_LABELS = "pseudo_labels"
"""Key of an unlabelled image's dict. Its value is the mean teacher's prediction on the weak view.

The weights of the mean teacher are the moving average of the model's weights.
"""


@runtime_checkable
class SupportsUnlabelled(Protocol):
    """A detector that also learns from the ``UNLABELLED`` images of a batch."""

    def pseudo_labels(self, batches: Sequence[BatchedInputs]) -> Sequence[Any]:
        """Returns the ``PSEUDO_LABELS`` of each image. Called on the mean teacher.

        ``batches`` are the unlabelled images of each micro-batch of this process. Every process
        must call this function, because it may normalize over all processes.
        """


OLD_PREDICTIONS = "old_predictions"
"""Key of a labelled image's dict. Its value is the prediction of the detector before the training.

A model that keeps this detector's classes learns from it where they are not annotated.
"""


@runtime_checkable
class SupportsKeptClasses(Protocol):
    """A detector that can keep the classes of an old detector while it learns new ones."""

    def predict_old(self, batched_inputs: BatchedInputs) -> Sequence[Any]:
        """Returns the ``OLD_PREDICTIONS`` of each image. Called on the old detector."""


def is_trainable(model: type | object) -> bool:
    """Returns whether a model or class can be trained (its attribute of this name)."""
    return bool(getattr(model, "is_trainable", True))


def get_metrics(model: nn.Module) -> Mapping[str, Tensor]:
    """Returns scalar tensors by name, which are logged with the losses (``model.metrics``)."""
    return getattr(model, "metrics", {})


def keeps_backbone_in_eval(model: nn.Module) -> bool:
    """Returns whether training leaves the backbone in evaluation mode (``backbone_is_frozen``)."""
    return bool(getattr(model, "backbone_is_frozen", False))


def has_held_out_loss(model: type | object) -> bool:
    """Returns whether a model or class returns losses in evaluation (its ``held_out_loss``)."""
    return bool(getattr(model, "held_out_loss", True))


def pretrain_only_modules(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of child modules that only models of the same architecture load."""
    return tuple(getattr(model, "pretrain_only_modules", ()))


def optional_modules(model: nn.Module) -> list[str]:
    """Returns paths of modules that files may contain although this model does not build them."""
    paths = []
    for path, module in model.named_modules():
        for child in getattr(module, "optional_modules", ()):
            paths.append(f"{path}.{child}" if path else child)
    return paths


@runtime_checkable
class FixedSizeModel(Protocol):
    """A model for square images of one size: a classifier or a pre-training objective."""

    image_size: int
    """S, the height and width of the images."""
    in_feature: str
    """Name of the backbone's feature map that the model pools or learns from."""
    head_in_features: list[str]
    """Names of all outputs of the backbone that the model reads."""

    def preprocess_image(self, batched_inputs: BatchedInputs) -> Tensor:
        """Returns normalized images (N, 3, S, S) on the model's device."""


@runtime_checkable
class PretrainingObjective(FixedSizeModel, Protocol):
    """A model that pre-trains its backbone without labels."""

    held_out_loss: bool
    """Whether ``forward`` returns losses in evaluation."""


def get_views(cfg: CfgNode) -> Mapping[str, Sequence[str]]:
    """Returns the kinds of views that the config's model evaluates, each with its quarters.

    A kind of view is "corner", for example. Its quarters are the positions of the visible quarter,
    which images use in turn. In a view without quarters, the whole image is visible.
    """
    model_class = META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)
    if not hasattr(model_class, "views_from_config"):
        return {"image": ()}
    return model_class.views_from_config(cfg)


def get_pixel_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers ``pixel_mean`` and ``pixel_std`` by name, if the model has them."""
    buffers = {name: getattr(model, name, None) for name in ("pixel_mean", "pixel_std")}
    return {name: value for name, value in buffers.items() if isinstance(value, Tensor)}


def get_pixel_format(model: nn.Module) -> str:
    """Returns the channel order of a model's images, "BGR" or "RGB"; "" if it is unknown.

    It is ``input_format``, as in Detectron2's detectors, or else ``pixels.format`` of a backbone.
    """
    for module in model.modules():
        pixels = getattr(module, "pixels", None)
        pixel_format = getattr(module, "input_format", None) or getattr(pixels, "format", "")
        if pixel_format:
            return str(pixel_format)
    return ""


def normalise_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalizes (..., C, H, W) by the mean and standard deviation of each channel."""
    channel_mean = torch.tensor(mean, device=images.device).view(-1, 1, 1)
    channel_std = torch.tensor(std, device=images.device).view(-1, 1, 1)
    return (images - channel_mean) / channel_std


def masks_padding(model: object) -> bool:
    """Returns whether the results of an image are independent of its padding."""
    return bool(getattr(model, "masks_padding", False))


@runtime_checkable
class PreparesImages(Protocol):
    """A model whose ``preprocess_image`` prepares a batch for its backbone.

    If a model can train on cached features, its ``preprocess_image`` also accepts inputs with
    "features" instead of "image", and returns the result of ``find_cached_images`` for them.
    """

    def preprocess_image(self, batched_inputs: BatchedInputs) -> Tensor | ImageList:
        """Returns normalized images (N, 3, H, W), or an ``ImageList`` if they are padded."""


def prepare_backbone_inputs(model: PreparesImages, batched_inputs: BatchedInputs) -> list[Tensor]:
    """Returns the arguments with which a model calls its backbone for a batch.

    These are the images (N, 3, H, W). If some of them are padded, and the model masks padding, the
    second argument is the heights and widths (N, 2) of the unpadded images.
    """
    images = model.preprocess_image(batched_inputs)
    if isinstance(images, Tensor):
        return [images]
    padded_size = tuple(images.tensor.shape[-2:])
    is_padded = any(tuple(size) != padded_size for size in images.image_sizes)
    if is_padded and masks_padding(model):
        return [images.tensor, torch.tensor(images.image_sizes, device=images.tensor.device)]
    return [images.tensor]


PATCHES = "patches"
"""Key of ``MaskedPatches`` in the result for an image, if a model reconstructs its patches."""


@dataclass(frozen=True)
class MaskedPatches:
    """The L patches of an image, each with P = 3 * patch_size ** 2 values, channel by channel.

    Attributes:
        pixels: normalized pixels, (L, P).
        target: what the model predicts, (L, P), such as the pixels scaled to variance 1.
        visible: mask (L,), True at patches that the encoder sees. The others are predicted.
    """

    pixels: Tensor
    target: Tensor
    visible: Tensor


def needs_targets(model: nn.Module) -> bool:
    """Returns whether inputs need the key "targets" with a dict of the teacher's feature maps.

    The teacher is the frozen network of ``MODEL.TEACHER``.
    """
    return bool(getattr(model, "needs_targets", False))


@runtime_checkable
class SupportsLayerGroups(Protocol):
    """A backbone that groups its parameters by layer, as timm's models do."""

    def group_matcher(self) -> Any:
        """Returns patterns of parameter names, for ``timm.models.group_parameters``."""


def get_backbone(model: nn.Module) -> Backbone | None:
    """Returns ``model.backbone``. None if it is missing or not a Detectron2 ``Backbone``."""
    backbone = getattr(model, "backbone", None)
    if isinstance(backbone, Backbone):
        return backbone
    return None


def get_timm_name(model: nn.Module) -> str:
    """Returns timm's name of a model's backbone. "" if the backbone is not a timm model."""
    for module in model.modules():
        timm_name = getattr(module, "timm_name", "")
        if timm_name:
            return timm_name
    return ""


def get_token_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that compute Mobile-Former's tokens.

    Modules list the names of such parameters, or of child modules with such parameters, in the
    attribute ``token_path``.
    """
    token_parameters = []
    for module in model.modules():
        for token_name in getattr(module, "token_path", ()):
            for name, parameter in module.named_parameters():
                if name == token_name or name.startswith(f"{token_name}."):
                    token_parameters.append(parameter)
    return token_parameters


def get_body_name(backbone: nn.Module) -> str:
    """Returns the name of the child that a backbone wraps: "bottom_up", "net", or "" if none."""
    children = dict(backbone.named_children())
    for name in ("bottom_up", "net"):
        if name in children:
            return name
    return ""


def get_encoder(backbone: Backbone) -> Backbone:
    """Returns a backbone without its feature pyramid and without ``CachedBackbone`` around it."""
    children = dict(backbone.named_children())
    body: Any = children.get(get_body_name(backbone))
    if not isinstance(body, Backbone):
        body = backbone
    return getattr(body, "encoder", body)  # the network inside a CachedBackbone


def get_num_classes(model: nn.Module) -> int | None:
    """Returns the number of classes of a detector (``num_classes``), or None if it is unknown."""
    number = getattr(model, "num_classes", None)
    return number if isinstance(number, int) else None


def get_in_features(module: nn.Module) -> list[str] | None:
    """Returns the names of the outputs that a model or pyramid reads, or None if unknown."""
    names = getattr(module, "head_in_features", None) or getattr(module, "in_features", None)
    if not names:
        return None
    return list(names)


def pick_outputs(backbone: Backbone, names: Sequence[str], key: str) -> list[ShapeSpec]:
    """Returns the shapes of the outputs ``names``. Raises a ``ValueError`` if one is unknown.

    ``key`` is the config key that the error message names.
    """
    shapes = backbone.output_shape()
    if not names or set(names) - set(shapes):
        known = list(shapes)
        raise ValueError(f"{key} {list(names)} are not all among the backbone's outputs {known}")
    return [shapes[name] for name in names]


def get_freeze_all(backbone: Backbone) -> int:
    """Returns the lowest ``MODEL.BACKBONE.FREEZE_AT`` that freezes all layers (``freeze_all``)."""
    return int(getattr(backbone, "freeze_all", 5))
