# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Stands where a frozen encoder stood, and gives features that were computed before training.

A head trained on it sees what it would see above the encoder, with one exception. In a batch of
differently sized images, the encoder's receptive field reaches the padding, whereas cached features
are exactly those of each image alone, with zeros behind them. Heads that mask the padding (MF-DETR)
see no difference; RetinaNet does, and a large one.
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


class CachedBackbone(Backbone):
    """A frozen encoder that is not run: each image of a batch brings its features along.

    The encoder stays on the CPU, and is no child: neither the optimizer, nor the device, nor a
    wrapper for several processes knows of it. Its weights are loaded and saved under the names that
    they have without a cache. Copies of the model share it.

    Features are trusted only for the weights that they were computed with: before ``trust``, and
    once other weights are loaded, ``forward`` refuses.
    """

    def __init__(
        self, *, encoder: Backbone, outputs: Sequence[str], channels_last: bool = False
    ) -> None:
        """
        Args:
            encoder: the network whose place is taken, frozen to its end.
            outputs: names of the outputs that the model reads.
            channels_last: whether the encoder's maps have their channels innermost in memory.
        """
        super().__init__()
        shapes = encoder.output_shape()
        self.outputs = list(outputs)
        self._shapes: dict[str, ShapeSpec] = {name: shapes[name] for name in outputs}
        self._all_shapes = shapes
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shared = _Shared(encoder)
        self._entries: Sequence[Mapping[str, Any]] | None = None
        # Of parts that the config leaves out, which files may hold; see ``checkpoint/fitting.py``.
        self.optional_modules = tuple(optional_modules(encoder))

    @property
    def encoder(self) -> Backbone:
        """The network itself."""
        return self._shared.encoder

    @property
    def size_divisibility(self) -> int:
        """The encoder's."""
        return int(self.encoder.size_divisibility)

    @property
    def padding_constraints(self) -> dict[str, int]:
        """The encoder's; older Detectron2 knows none."""
        return dict(getattr(self.encoder, "padding_constraints", {}))

    def output_shape(self) -> dict[str, ShapeSpec]:
        """The encoder's."""
        return dict(self._all_shapes)

    def train(self, mode: bool = True) -> "CachedBackbone":
        """Sets the encoder's mode too, as where it is a child."""
        super().train(mode)
        self.encoder.train(mode)
        return self

    def attach(self, model: nn.Module) -> None:
        """Makes the inputs of ``model``, which this is a part of, known here at each call."""
        # A bound method: a copy of the model has one that is bound to the copy of this.
        model.register_forward_pre_hook(self._take_entries, with_kwargs=True)

    @property
    def is_trusted(self) -> bool:
        """Whether features are those of the encoder's present weights."""
        return self._shared.trusted

    def trust(self) -> None:
        """Declares that features to come are those of the encoder's present weights."""
        self._shared.trusted = True

    def forward(self, x: Tensor, image_sizes: Tensor | None = None) -> dict[str, Tensor]:
        """
        Args:
            x: (N, 3, H, W), of which only size and device matter.
            image_sizes: not needed; some models hand them over.

        Returns:
            The outputs by name, float32 on x's device: (N, C, ceil(H / s), ceil(W / s)), zero at
            the right and the bottom of smaller images, and "tokens" (N, M, D).

        Raises:
            UserError: an image comes without features, or they are not of these weights or of an
                image of this size.
        """
        entries, self._entries = self._entries, None
        if not self._shared.trusted:
            raise UserError(
                "the encoder's weights are not those that the cached features were computed with: "
                "train through qbheat_det.engine.Trainer, which computes them after loading, or "
                "set MODEL.CACHE_FEATURES.ENABLED False"
            )
        features = [_features_of(entry) for entry in entries or ()]
        if len(features) != len(x):
            raise UserError(
                f"{len(features)} images brought cached features to a batch of {len(x)}: call the "
                "model on entries with 'features', or set MODEL.CACHE_FEATURES.ENABLED False"
            )
        return {name: self._batch(name, features, x) for name in self.outputs}

    @contextmanager
    def encoding(self, device: torch.device) -> Iterator[None]:
        """Within it the encoder is on a device, for ``encode``."""
        self.encoder.to(device)
        try:
            yield
        finally:
            self.encoder.to("cpu")

    def encode(self, model: nn.Module, batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns what the encoder gives where ``model``, in its present mode, runs it on a batch.

        The model itself prepares the images, so that they are normalised and padded as without a
        cache; what stands behind the encoder is not run.

        Args:
            model: that this is attached to.
            batch: N entries of a dataset mapper, images of one size.

        Returns:
            The outputs by name, with N in front.
        """
        hook = self.register_forward_pre_hook(self._encode_instead, with_kwargs=True)
        try:
            # On CPUs, kernels are chosen, and round, by whether gradients are on, needed or not.
            with hook, torch.set_grad_enabled(model.training):
                model(list(batch))
        except _Encoded as encoded:
            return {name: encoded.outputs[name] for name in self.outputs}
        finally:
            self._entries = None
        raise RuntimeError(f"{type(model).__name__} did not run its backbone")

    def _encode_instead(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Encoded(self.encoder(*args, **kwargs))

    def _take_entries(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entries = args[0] if args else next(iter(kwargs.values()), None)

    def _batch(self, name: str, features: Sequence[Mapping[str, Tensor]], x: Tensor) -> Tensor:
        """Returns one output of the batch; it goes to the device at once, in the cache's type."""
        maps = [stored[name] for stored in features]
        shape, stride = list(maps[0].shape), self._shapes[name].stride
        dtype = torch.float32 if x.device.type == "cpu" else maps[0].dtype
        if stride is None:
            return torch.stack(maps).to(x.device, non_blocking=True).float()
        shape[1:] = [-(-side // stride) for side in x.shape[2:]]
        batch = torch.empty(
            (len(maps), *shape),
            dtype=dtype,
            memory_format=self._layout,
            pin_memory=x.device.type == "cuda",
        )
        for out, stored in zip(batch, maps, strict=True):
            height, width = stored.shape[1:]
            if height > shape[1] or width > shape[2]:
                raise UserError(
                    f"cached features '{name}' are {height} x {width}, but the image is "
                    f"{shape[1]} x {shape[2]} at stride {stride}: they are of another image"
                )
            if stored.shape == out.shape:  # most often; cutting takes as long as copying
                out.copy_(stored)
                continue
            out[:, :height, :width] = stored
            out[:, height:] = 0
            out[:, :height, width:] = 0
        return batch.to(x.device, non_blocking=True).float()

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
        # Not the base class's: it would call every name unexpected that is of no child.
        own = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
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
    """What copies of a cached backbone have in common."""

    def __init__(self, encoder: Backbone) -> None:
        self.encoder = encoder
        self.trusted = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


class _Encoded(Exception):
    """Carries the encoder's outputs past the rest of the model."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        super().__init__("the encoder has run")
        self.outputs = outputs


def _features_of(entry: Mapping[str, Any]) -> Mapping[str, Tensor]:
    if "features" not in entry:
        raise UserError(
            f"image '{entry.get('file_name', '')}' comes without cached features: the model was "
            "built with MODEL.CACHE_FEATURES.ENABLED, which is for training; set it to False"
        )
    features: Mapping[str, Tensor] = entry["features"]
    return features
