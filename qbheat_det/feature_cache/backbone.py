# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Replaces a frozen encoder by a backbone that batches cached features.

The head receives the same features as from the encoder, except in batches of images of several
sizes: there the encoder sees padding, but each image was cached alone. MF-DETR masks the padding,
so its outputs are equal; those of RetinaNet and FCOS differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import optional_modules
from qbheat_det.modeling.image_model import CachedImages

_OFF = "set MODEL.CACHE_FEATURES.ENABLED False"


class CachedBackbone(Backbone):
    """Batches the features that come with the images instead of running the encoder.

    The model's ``preprocess_image`` passes a ``CachedImages`` instead of pixels. The encoder stays
    on the CPU and is no child module, so optimizer, device moves and data-parallel wrappers skip
    it. Its weights are loaded and saved under their usual names. Copies of the model share it.

    ``forward`` raises before ``trust`` is called, and again after other weights are loaded.
    """

    def __init__(
        self, *, encoder: Backbone, outputs: Sequence[str], channels_last: bool = False
    ) -> None:
        """Takes a frozen encoder, the names of its outputs to read, and the layout of its maps."""
        super().__init__()
        self.outputs = list(outputs)
        self._shapes: dict[str, ShapeSpec] = encoder.output_shape()
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shared = _Shared(encoder)
        self._is_encoding = False
        # Weights files may hold these parts although the config leaves them out.
        self.optional_modules = tuple(optional_modules(encoder))

    @property
    def encoder(self) -> Backbone:
        """The frozen network."""
        return self._shared.encoder

    @property
    def size_divisibility(self) -> int:
        """The encoder's."""
        return int(self.encoder.size_divisibility)

    def output_shape(self) -> dict[str, ShapeSpec]:
        """The encoder's."""
        return dict(self._shapes)

    def train(self, mode: bool = True) -> "CachedBackbone":
        """Sets the encoder's mode too, as if it were a child."""
        super().train(mode)
        self.encoder.train(mode)
        return self

    @property
    def is_trusted(self) -> bool:
        """Whether the features belong to the encoder's current weights."""
        return self._shared.trusted

    def trust(self) -> None:
        """Declares that the features belong to the encoder's current weights."""
        self._shared.trusted = True

    def forward(
        self, x: CachedImages | Tensor, image_sizes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the outputs by name, for images with features, or for pixels within ``encode``.

        Maps are (N, C, ceil(H / s), ceil(W / s)), "tokens" (N, M, D), float32; ``image_sizes`` (N,
        2) is for encoders that mask padding. Raises a ``UserError`` if the images have no features,
        or the features belong to other weights.
        """
        if self._is_encoding:
            raise _Encoded(self.encoder(x) if image_sizes is None else self.encoder(x, image_sizes))
        if not self.is_trusted:
            raise UserError(
                "the encoder's weights are not those that the cached features were computed with: "
                f"train through qbheat_det.engine.Trainer, or {_OFF}"
            )
        if not isinstance(x, CachedImages):
            raise UserError(f"images come without cached features: {_OFF}")
        return {
            name: x.batch(name, self._shapes[name].stride, self._layout) for name in self.outputs
        }

    @contextmanager
    def encoding(self, device: torch.device) -> Iterator[None]:
        """Moves the encoder to a device for calls of ``encode``."""
        self.encoder.to(device)
        try:
            yield
        finally:
            self.encoder.to("cpu")

    def encode(self, model: nn.Module, batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns the encoder's outputs by name for a batch of ``model``.

        The model prepares the images, so that normalisation, padding and masks are the same as
        without a cache. Its forward pass ends after the encoder.
        """
        self._is_encoding = True
        try:
            # On CPUs, enabled gradients select other kernels, which round differently.
            with torch.set_grad_enabled(model.training):
                model(list(batch))
        except _Encoded as encoded:
            return {name: encoded.outputs[name] for name in self.outputs}
        finally:
            self._is_encoding = False
        raise RuntimeError(f"{type(model).__name__} did not run its backbone")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
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
        # The base class would report the names as unexpected: the encoder is no child.
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        before = self.encoder.state_dict()
        self._shared.trusted &= all(
            name in before and torch.equal(before[name].cpu(), value.cpu())
            for name, value in own.items()
        )
        try:
            found = self.encoder.load_state_dict(own, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys.extend(prefix + name for name in found.missing_keys)
        unexpected_keys.extend(prefix + name for name in found.unexpected_keys)


class _Shared:
    """State that copies of a cached backbone share."""

    def __init__(self, encoder: Backbone) -> None:
        self.encoder = encoder
        self.trusted = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


class _Encoded(Exception):
    """Ends a model's forward pass after its encoder, and carries the encoder's outputs."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        super().__init__("the encoder has run")
        self.outputs = outputs
