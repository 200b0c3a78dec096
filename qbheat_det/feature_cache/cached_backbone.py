# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Replaces the encoder of a model in training by one that returns cached features.

``CachedBackbone`` returns the same features as the encoder, except for batches of images of
different sizes. In such batches, the encoder would see padding, but cached images have no padding.
MF-DETR masks the padding, so its outputs are the same. RetinaNet's and FCOS's outputs differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.cached_images import CachedImages
from qbheat_det.modeling.contracts import (
    PreparesImages,
    get_pixel_format,
    keeps_backbone_in_eval,
    optional_modules,
    prepare_backbone_inputs,
)

OFF = "set MODEL.CACHE_FEATURES.ENABLED False"


class CachedBackbone(Backbone):
    """A backbone that returns the cached features of images instead of running its encoder.

    The encoder stays on the CPU and is not a child module, so optimizers, ``to`` and data-parallel
    wrappers ignore it. Its weights are loaded and saved under their usual names. Copies of the
    model share the encoder.

    ``forward`` raises an error until ``trust`` is called, and again after other weights are loaded.
    """

    def __init__(
        self, *, encoder: Backbone, outputs: Sequence[str], channels_last: bool = False
    ) -> None:
        """
        Args:
            encoder: the frozen network.
            outputs: names of the encoder's outputs that are cached.
            channels_last: whether ``forward`` returns feature maps in channels-last format.
        """
        super().__init__()
        self.outputs = list(outputs)
        self._shapes: dict[str, ShapeSpec] = encoder.output_shape()
        self._memory_format = torch.contiguous_format
        if channels_last:
            self._memory_format = torch.channels_last
        self._shared = _Shared(encoder)
        # Weights files may contain these parts even if the config does not use them.
        self.optional_modules = tuple(optional_modules(encoder))
        self.input_format = get_pixel_format(encoder)  # with which weights are compared

    @property
    def encoder(self) -> Backbone:
        """The encoder that computed the features."""
        return self._shared.encoder

    @property
    def size_divisibility(self) -> int:
        return int(self.encoder.size_divisibility)

    def output_shape(self) -> dict[str, ShapeSpec]:
        return dict(self._shapes)

    def train(self, mode: bool = True) -> "CachedBackbone":
        """Sets the mode of this module and of the encoder."""
        super().train(mode)
        self.encoder.train(mode)
        return self

    @property
    def is_trusted(self) -> bool:
        """Whether the cached features were computed with the encoder's current weights."""
        return self._shared.trusted

    def trust(self) -> None:
        """Declares that the cached features were computed with the encoder's current weights."""
        self._shared.trusted = True

    def forward(self, x: CachedImages, image_sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the cached outputs of a batch by name, in float32.

        For padded images (N, 3, H, W), a feature map with stride s is (N, C, ceil(H / s),
        ceil(W / s)). "tokens" are (N, M, D). ``image_sizes`` has no effect: cached images had no
        padding when they were encoded.

        Raises:
            UserError: the images have no features, or the encoder's weights have changed since the
                features were computed.
        """
        if not self.is_trusted:
            raise UserError(
                "the encoder's weights are not those that the cached features were computed with: "
                f"train through qbheat_det.engine.Trainer, or {OFF}"
            )
        if not isinstance(x, CachedImages):
            raise UserError(f"images come without cached features: {OFF}")
        return {
            name: x.batch(name, self._shapes[name].stride, self._memory_format)
            for name in self.outputs
        }

    @contextmanager
    def encoding(self, device: torch.device) -> Iterator[None]:
        """Moves the encoder to a device while the context is active, for calls of ``encode``."""
        self.encoder.to(device)
        try:
            yield
        finally:
            self.encoder.to("cpu")

    def encode(self, model: nn.Module, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns the encoder's outputs by name for a batch of inputs of ``model``.

        The model prepares the images, so that normalization, padding and masks are the same as
        without a cache. ``model`` must have the protocol ``PreparesImages``.
        """
        assert isinstance(model, PreparesImages)  # ``check_frozen`` refuses other models
        # Nothing is trained here. But on CPUs, gradients change the choice of kernels, which round
        # differently, so gradients are enabled as in a call of the model.
        has_gradients = model.training and not keeps_backbone_in_eval(model)
        with torch.set_grad_enabled(has_gradients):
            outputs = self.encoder(*prepare_backbone_inputs(model, batch))
        return {name: outputs[name] for name in self.outputs}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Saves the encoder's weights under their usual names, as if it were not replaced."""
        self.encoder.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads the encoder's weights. If they differ, the features are no longer trusted.

        Does not call the base class, which would report the encoder's weights as unexpected,
        because the encoder is not a child module.
        """
        loaded: dict[str, Tensor] = {}
        for name, value in state_dict.items():
            if name.startswith(prefix):
                loaded[name.removeprefix(prefix)] = value
        before = self.encoder.state_dict()
        is_unchanged = all(
            name in before and torch.equal(before[name].cpu(), value.cpu())
            for name, value in loaded.items()
        )
        if not is_unchanged:
            self._shared.trusted = False
        try:
            result = self.encoder.load_state_dict(loaded, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys.extend(prefix + name for name in result.missing_keys)
        unexpected_keys.extend(prefix + name for name in result.unexpected_keys)


class _Shared:
    """The encoder, and whether the features are its own. All copies of a model share it."""

    def __init__(self, encoder: Backbone) -> None:
        self.encoder = encoder
        self.trusted = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self
