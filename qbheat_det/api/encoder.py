# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Encoder``, which returns the features of images."""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import names_keywords
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.images import Image, Picture, is_video, open_images
from qbheat_det.inference.predict import encode

from .trained import Trained


class Encoder(Trained):
    """A trained backbone for images of any size."""

    def __init__(self, model: nn.Module | ExportedModel, cfg: CfgNode | None = None) -> None:
        """
        Args:
            model: a Detectron2 backbone in evaluation mode, or an exported backbone.
            cfg: config of the model, including ``MODEL.WEIGHTS``; None for an exported backbone.
        """
        if isinstance(model, ExportedModel):
            super().__init__(None, exported=model)
        else:
            super().__init__(cfg, model=model)

    def __call__(self, images: Picture | Iterable[Picture]) -> dict[str, Tensor]:
        """Returns the outputs by name: feature maps (N, C, H, W) and tokens (N, M, D).

        Images of different sizes are padded at the bottom and right. An exported encoder resizes
        images instead, and needs images of one size.

        Args:
            images: as in ``Detector.predict``, except videos.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        pictures = list(self._open(images))
        if self._exported is None:
            return encode(self.model, self.cfg, pictures)
        shapes = {picture.shape for picture in pictures}
        if len(shapes) > 1:
            raise UserError("an exported encoder needs images of one size")
        batch = np.stack(pictures)  # (N, H, W, 3)
        if self._exported.info.pixel_format == "BGR":
            batch = batch[..., ::-1]
        outputs = self._exported(batch)
        return {name: torch.from_numpy(value) for name, value in outputs.items()}

    @property
    def coarsest_map(self) -> str:
        """The name of the feature map with the largest stride; the last one if there are several.

        Raises a ``UserError`` if the encoder is exported.
        """
        from qbheat_det.probing import find_feature  # prediction needs no probes

        self._require_weights("use")
        return find_feature(self.model)

    @names_keywords
    def embed(self, images: Picture | Iterable[Picture]) -> Tensor:
        """Returns a vector per image (N, D), the mean of the coarsest feature map, on the CPU.

        Images are opened and processed one by one, so a vector does not depend on the other images,
        and ``images`` may be a generator.

        Args:
            images: as in ``Detector.predict``, except videos.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        vectors = []
        for image in self._open(images):
            outputs = self(image).values()
            maps = [output for output in outputs if output.dim() == 4]  # (1, C, H, W), not tokens
            coarsest = min(maps, key=lambda output: output.shape[2] * output.shape[3])
            vectors.append(coarsest.mean(dim=(2, 3))[0].cpu())  # (C,)
        return torch.stack(vectors)

    def _open(self, images: Picture | Iterable[Picture]) -> Iterator[Image]:
        """Returns an iterator over RGB images (H, W, 3), uint8. Raises an error for a video."""
        if is_video(images):
            raise UserError(f"'{images}' is a video: pass its frames")
        return (named_image.image for named_image in open_images(images))

    def _find_no_boxes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a ``UserError``, because only a ``Detector`` finds boxes."""
        raise UserError(
            f"'{self.weights}' is an encoder and finds no boxes: train a detector on it"
        )

    predict = stream = evaluate = train = deploy = _find_no_boxes
