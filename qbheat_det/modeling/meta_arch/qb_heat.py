# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat: pre-training by linear prediction of three quarters of an image from the fourth.

Paper: "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al.,
arXiv:2211.13228, Sec. 3, 4 and Appendix A. What it leaves open is said in the parts, in
``modeling/pretrain``. Of Mobile-Former, the output that is predicted is "s16_expanded", which the
paper counts as part of the backbone and its classifiers and decoders read: pre-trained from any
earlier map, the last convolution would stay random under a frozen backbone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from torch import Tensor

from qbheat_det.modeling.pretrain import (
    PLACES,
    PLACES_OF,
    HeatPredictor,
    Reconstruction,
    ReconstructionDecoder,
    ReconstructionLoss,
    ReconstructionModel,
    VisibleQuarters,
    visible_positions,
)


@META_ARCH_REGISTRY.register()
class QBHeat(ReconstructionModel):
    """An encoder of a quarter of the image, linear predictions of the rest, a decoder to pixels.

    Any Detectron2 backbone serves as encoder; it sees the visible quarter alone, at a quarter of
    the cost. Its map has G x G positions over the image, one for each patch of its stride; G is a
    multiple of 4.

    The matrices of the paper are ``predictor.scales["corner"].matrices()["A1"]`` and so on.
    """

    predictor: HeatPredictor
    grid_multiple = 4  # a quarter falls into quarters

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        predictor: HeatPredictor,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        in_feature: str,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        """
        Args:
            predictor: from the features of the visible quarter to those of the image.

        All others, and what is raised, are those of ``ReconstructionModel``.
        """
        super().__init__(
            backbone=backbone,
            predictor=predictor,
            decoder=decoder,
            loss=loss,
            in_feature=in_feature,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
        )
        visible = visible_positions(decoder.grid_size).flatten(1)
        self.register_buffer("visible", visible, persistent=False)
        self.visible: Tensor  # (5, G * G), by place

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.QB_HEAT
        predictor = HeatPredictor(
            dim=node.FEATURE_DIM, num_models=node.NUM_MODELS, visible=node.VISIBLE
        )
        return {**cls.shared_from_config(cfg), "predictor": predictor}

    @classmethod
    def views_from_config(cls, cfg: CfgNode) -> Mapping[str, Sequence[str]]:
        """Returns ``views`` of the model of a config."""
        kinds = ("corner", "centre")
        return {k: PLACES_OF[k] for k in kinds if cfg.MODEL.QB_HEAT.VISIBLE in (k, "both")}

    @property
    def views(self) -> Mapping[str, Sequence[str]]:
        """The kinds of visible quarters, "corner" and "centre", with their places."""
        return {kind: PLACES_OF[kind] for kind in self.predictor.scales}

    def forward(
        self, batched_inputs: list[dict[str, Any]], places: Sequence[str] | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S) and, where a test set
                says so, "place".
            places: of the visible quarters, one name of ``PLACES`` an image. By default they are
                drawn in training; else they are the images' own, and where those have none, the
                images of a batch take them in turn.

        Returns:
            A dict of losses in training; else a list with a dict for each image: "reconstruction"
            (3, S, S) in the mapper's pixels, where nothing is copied from the image but, with
            normalised patches, the mean and the deviation of each; "visible" (S, S), True where
            the encoder looked; "place"; "loss_reconstruction", 0-d.
        """
        images = self.preprocess_image(batched_inputs)
        if places is None and not self.training:
            own = [entry["place"] for entry in batched_inputs if "place" in entry]
            places = own if len(own) == len(images) else None
        quarters = self.choose_quarters(len(images), places)
        images = images[quarters.order]
        z = self.predictor(self.encode(quarters.crop(images)), quarters.counts)
        visible = quarters.spread(self.visible)
        if self.training:
            return self.training_losses(z, images, visible, visible.shape[1] * 3 // 4)
        return self.inference_at(quarters, self.reconstruct(z, images, visible))

    def choose_quarters(self, num_images: int, places: Sequence[str] | None) -> VisibleQuarters:
        """Returns where each image is visible, see ``places`` in ``forward``.

        Raises:
            ValueError: a place is unknown, or the predictor is not made for it.
        """
        known = PLACES_OF[self.predictor.visible]
        if places is None:
            if self.training:
                return VisibleQuarters.draw(
                    num_images, visible=self.predictor.visible, device=self.device
                )
            places = [known[i % len(known)] for i in range(num_images)]
        if len(places) != num_images or set(places) - set(known):
            raise ValueError(
                f"each of the {num_images} images needs a place of {known}, not {list(places)}"
            )
        return VisibleQuarters.at(places, device=self.device)

    def inference_at(
        self, quarters: VisibleQuarters, reconstruction: Reconstruction
    ) -> list[dict[str, Any]]:
        """Returns what ``inference`` does, with "place", in the batch's order."""
        names = [
            name for name, count in zip(PLACES, quarters.counts, strict=True) for _ in range(count)
        ]
        found = self.inference(reconstruction)
        results: list[dict[str, Any]] = [{} for _ in names]
        for index, name, result in zip(quarters.order.tolist(), names, found, strict=True):
            results[index] = {**result, "place": name}
        return results
