# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run of pre-training looks at: reconstructions, spectrum, spatial correlation.

No objective is named here. A look is built where the model has the parts that the look needs.
"""

import io
from statistics import fmean
from typing import cast

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from PIL import Image
from torch import nn

from qbheat_det.analysis.reconstruction_pictures import draw_sheet
from qbheat_det.analysis.reconstruction_views import ReconstructingModel, reconstruct_views
from qbheat_det.analysis.spatial_correlation import correlate_images, summarize_correlation
from qbheat_det.analysis.spectrum import RotatedControl, Spectrum, describe_models
from qbheat_det.analysis.spectrum_charts import plot_spectrum
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.modeling.contracts import (
    BatchedInputs,
    FixedSizeModel,
    PretrainingObjective,
    ReconstructionObjective,
    get_backbone,
    get_linear_models,
)

from .looking import Look
from .spread_images import read_spread

CORRELATED_IMAGES = 64
"""Over how many images spatial correlation is taken."""
_BATCH_SIZE = 32


def build_looks(cfg: CfgNode, model: nn.Module) -> list[Look]:
    """Returns the looks of a run that fit its model; none for a model that is not pre-trained.

    Raises:
        UserError: a key of ``VIS`` makes no sense.
    """
    keys = cfg.VIS
    if not 0 <= keys.SHARE <= 1:
        raise UserError(f"VIS.SHARE is a share of the run's time, 0 to 1, not {keys.SHARE}")
    if keys.NUM_IMAGES < 1:
        raise UserError(
            f"VIS.NUM_IMAGES is at least 1, not {keys.NUM_IMAGES}; VIS.ENABLED False looks at "
            "nothing"
        )
    if not keys.ENABLED or not isinstance(model, PretrainingObjective):
        return []
    settings = {"period": keys.PERIOD, "share": keys.SHARE}
    images = FixedImages(cfg)
    looks: list[Look] = []
    if isinstance(model, ReconstructionObjective):
        looks.append(LookAtReconstructions(cfg, images, **settings))
    if get_linear_models(model):
        looks.append(LookAtSpectrum(**settings))
    return [*looks, LookAtCorrelation(images, **settings)]


class LookAtReconstructions(Look):
    """Reconstructs fixed images from every view that the model has.

    Of QB-Heat these are a corner, the corners in turn, and the centre.

    Writes ``reconstructions_<steps>.png`` and, with the loss of each image, ``.json``.
    """

    def __init__(self, cfg: CfgNode, images: "FixedImages", *, period: int, share: float) -> None:
        """
        Args:
            cfg: ``VIS.NUM_IMAGES`` and ``INPUT.FORMAT``.
            images: where they come from.
            period: see ``Look``.
            share: see ``Look``.
        """
        super().__init__(period=period, share=share)
        self._cfg = cfg
        self._images = images

    def look(self) -> None:
        """Draws a row for each image: input, and for each kind what was visible and what made."""
        entries = self._images.load(self._cfg.VIS.NUM_IMAGES)
        model = cast(ReconstructingModel, self.trainer.evaluated_model)
        made = reconstruct_views(model, entries, pixel_format=self._cfg.INPUT.FORMAT)
        sheet = draw_sheet(made.columns, note=f"{self.steps:,} steps. {made.note}")
        self.show("reconstructions", sheet)
        names = [entry.get("file_name", "") for entry in entries]
        content = {"images": names, "note": made.note, **made.losses}
        self.write_json("reconstructions", content)
        self.record({f"reconstructions/{view}": mean for view, mean in made.mean_losses.items()})


class LookAtSpectrum(Look):
    """The spectrum of the linear models beside that of randomly rotated ones.

    Writes ``spectrum_<steps>.svg``, ``.png`` and, with all figures, ``.json``.
    """

    def __init__(self, *, period: int, share: float) -> None:
        """
        Args:
            period: see ``Look``.
            share: see ``Look``.
        """
        super().__init__(period=period, share=share)
        self._control = RotatedControl()

    def look(self) -> None:
        """Works out the figures, see ``qbheat_det.analysis.spectrum``."""
        scales = get_linear_models(self.trainer.evaluated_model)
        models = {
            kind: (scale.offset, {name: m.cpu() for name, m in scale.matrices().items()})
            for kind, scale in scales.items()
        }
        learned, control = describe_models(models), self._control.describe(models)
        self.write_json("spectrum", {**learned.to_dict(), "control": control.to_dict()})
        self.record(_name_figures(learned, "spectrum"))
        self.record(_name_figures(control, "spectrum_control"))
        svg = plot_spectrum(learned, control)
        self.write(f"spectrum_{self.steps:07d}.svg", svg)
        png = plot_spectrum(learned, control, format="png")
        with Image.open(io.BytesIO(png)) as picture:
            self.show("spectrum", np.asarray(picture.convert("RGB")))


class LookAtCorrelation(Look):
    """Spatial correlation of the backbone's map of whole images.

    Writes ``correlation_<steps>.json``.
    """

    def __init__(self, images: "FixedImages", *, period: int, share: float) -> None:
        """
        Args:
            images: where they come from.
            period: see ``Look``.
            share: see ``Look``.
        """
        super().__init__(period=period, share=share)
        self._images = images

    def look(self) -> None:
        """Measures it on ``CORRELATED_IMAGES``, see ``qbheat_det.analysis.spatial_correlation``."""
        entries = self._images.load(CORRELATED_IMAGES)
        model, backbone = self.trainer.evaluated_model, get_backbone(self.trainer.evaluated_model)
        assert isinstance(model, FixedSizeModel)
        assert backbone is not None
        batches = (
            model.preprocess_image(entries[start : start + _BATCH_SIZE])
            for start in range(0, len(entries), _BATCH_SIZE)
        )
        name = model.in_feature
        found = summarize_correlation(correlate_images(backbone, name, batches))
        self.record({"correlation/mean": found["mean"]})
        images = [entry.get("file_name", "") for entry in entries]
        self.write_json("correlation", {"map": name, "images": images, **found})


class FixedImages:
    """The same few images for all looks, read when the first look wants them.

    They are spread evenly over the first test set, or the first training set where there is no
    test set, and are what the mapper makes of them in inference. In the place of one that cannot
    be read stands the next that can.
    """

    def __init__(self, cfg: CfgNode) -> None:
        """
        Args:
            cfg: names data and mapper.
        """
        self._cfg = cfg
        self._kept: dict[int, BatchedInputs] = {}

    def load(self, number: int) -> BatchedInputs:
        """Returns so many images; where there are fewer, all.

        Raises:
            UserError: none can be read.
        """
        if number not in self._kept:
            self._kept[number] = self._read(number)
        return self._kept[number]

    def _read(self, number: int) -> BatchedInputs:
        name = (*self._cfg.DATASETS.TEST, *self._cfg.DATASETS.TRAIN)[0]
        records = DatasetCatalog.get(name)
        images = read_spread(records, build_mapper(self._cfg, is_train=False), number)
        if not images:
            raise UserError(f"the data set '{name}' has no image to look at that can be read")
        return images


def _name_figures(spectrum: Spectrum, prefix: str) -> dict[str, float]:
    """Returns the figures that are worth a curve."""
    figures = {}
    for kind, scale in spectrum.scales.items():
        figures[f"{prefix}/{kind}/energy_ratio"] = scale.energy_ratio
        figures[f"{prefix}/{kind}/commutator"] = fmean(scale.commutators.values())
        figures[f"{prefix}/{kind}/inverse_error"] = fmean(scale.inverse_errors.values())
        figures[f"{prefix}/{kind}/largest_eigenvalue"] = max(
            float(matrix.magnitudes[0]) for matrix in scale.matrices.values()
        )
        figures[f"{prefix}/{kind}/effective_rank"] = fmean(
            matrix.effective_rank for matrix in scale.matrices.values()
        )
    for name in ("cosines", "correlations"):
        if values := getattr(spectrum, name):
            figures[f"{prefix}/{name}"] = fmean(values.values())
    return figures
