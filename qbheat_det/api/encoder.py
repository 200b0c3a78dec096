# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Encoder``: a trained backbone as an object that is called with images."""

from collections.abc import Sequence

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.inference.encoder import encode
from qbheat_det.inference.exported import ExportedModel
from qbheat_det.inference.pictures import Picture, is_video, open_images
from qbheat_det.inference.video import Image

from .trained import Trained, names_mistakes


class Encoder(Trained):
    """A trained backbone for images of any size; ``model`` is its module."""

    _kind = "encoder"

    def __init__(self, model: nn.Module | ExportedModel, cfg: CfgNode) -> None:
        """``model`` is a Detectron2 backbone in evaluation mode, or an exported one."""
        self._exported = model if isinstance(model, ExportedModel) else None
        self.model = model if isinstance(model, nn.Module) else None
        self.cfg = cfg

    def __call__(self, images: Picture | Sequence[Picture]) -> dict[str, Tensor]:
        """Returns the outputs by name, maps (N, C, H, W) and tokens (N, M, D).

        Several images are padded to one size, at the bottom and right. An exported encoder resizes
        images, and takes several images of one size only.

        Raises:
            UserError: there are no images, or a file is missing or not an image.
        """
        if is_video(images):
            raise UserError(f"'{images}' is a video: give its frames")
        pictures = [each.image for each in open_images(images)]
        if self._exported is not None:
            return self._run_exported(pictures)
        return encode(self.model, self.cfg, pictures)

    @names_mistakes({"source": "images", "batch": "a list of images"})
    def embed(self, images: Picture | Sequence[Picture]) -> Tensor:
        """Returns one vector per image, (N, D): the mean of its coarsest map.

        Images are not padded, so a vector does not depend on the other images.

        Raises:
            UserError: as calling the encoder.
        """
        if is_video(images):
            raise UserError(f"'{images}' is a video: give its frames")
        vectors = []
        for each in open_images(images):
            maps = {name: x for name, x in self(each.image).items() if x.dim() == 4}
            coarsest = min(maps.values(), key=lambda x: x.shape[2] * x.shape[3])
            vectors.append(coarsest.mean(dim=(2, 3))[0])
        return torch.stack(vectors)

    def _run_exported(self, pictures: Sequence[Image]) -> dict[str, Tensor]:
        assert self._exported is not None
        if len({picture.shape for picture in pictures}) > 1:
            raise UserError("an exported encoder takes images of one size")
        step = -1 if self._exported.info.pixel_format == "BGR" else 1
        outputs = self._exported(np.stack(pictures)[..., ::step])
        return {name: torch.from_numpy(value) for name, value in outputs.items()}
