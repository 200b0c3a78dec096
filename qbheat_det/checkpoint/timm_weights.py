# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights of timm for the package's encoders, and the package's for timm.

Importing this module lets Detectron2's path manager resolve ``timm://resnet18.a1_in1k``: weights
are downloaded once, and kept in Detectron2's cache with their pixel statistics.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir
from timm.models import adapt_input_conv
from torch import Tensor, nn

from qbheat_det.config.loading import check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line

from .matching import bare_backbone, fit_weights
from .report import check_complete
from .weights_file import WeightsInfo, read_weights, save_weights

logger = logging.getLogger(__name__)
_PREFIX = "timm://"
_DECODER = "decoder."
_LINEAR = {"classifier.weight", "classifier.bias"}
_NORM = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class TimmWeights(PathHandler):
    """Resolves ``timm://<model>`` and ``timm://<model>.<tag>`` to a local file."""

    def _get_supported_prefixes(self) -> list[str]:
        return [_PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = path.removeprefix(_PREFIX)
        model_name, _, tag = name.partition(".")
        check_timm_name(model_name)
        tags = timm.list_pretrained(f"{model_name}.*")
        if tag and name not in tags:
            raise UserError(f"timm has no weights '{name}', but {', '.join(tags) or 'none'}")
        folder = Path(get_cache_dir()) / "timm"
        file = folder / f"{name}.safetensors"
        try:
            published = timm.get_pretrained_cfg(name)  # of a name without a tag the default one
            tag = published.tag if published else ""
            file = folder / f"{model_name}.{tag}.safetensors"
            if file.is_file() and not force:
                return str(file)
            logger.info("Downloading timm's weights '%s' to '%s'", name, file)
            model = timm.create_model(file.stem, pretrained=True)
        except Exception as error:  # of the name, the hub, the network or the file
            raise UserError(
                f"timm's weights '{name}' could not be downloaded ({one_line(error)}): copy "
                f"'{file.name}' from '{folder}' of another machine; `qbheat zoo list 'timm/*'` has "
                "networks whose weights are in Python's package index"
            ) from error
        own = model.pretrained_cfg
        mean, std = (tuple(255 * float(value) for value in own[key]) for key in ("mean", "std"))
        info = WeightsInfo(pixel_format="RGB", pixel_mean=mean, pixel_std=std)
        save_weights(str(file), model.state_dict(), info)
        return str(file)


def names_for_timm(
    state: Mapping[str, Tensor], model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Renames the tensors of a model on Mobile-Former as timm's Mobile-Former has them.

    Of a classifier with a linear decoder these are the backbone and the last layer, with a
    BatchNorm before it folded in; of all other models the backbone. timm's loaders pass ``model``.
    """
    names = bare_backbone(state)
    if not names:
        return dict(state)
    return {**{short: state[name] for name, short in names.items()}, **_fold_classifier(state)}


def _fold_classifier(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    decoder = {n.partition(_DECODER)[2]: tensor for n, tensor in state.items() if _DECODER in n}
    if any(name.startswith("neck.") for name in decoder):  # of the networks of "508M" to "26M"
        return decoder
    if not set(decoder) >= _LINEAR or not set(decoder) <= _LINEAR | _NORM:
        return {}  # a transformer decoder, or none
    weight, bias = decoder["classifier.weight"], decoder["classifier.bias"]
    if "norm.running_var" in decoder:
        scale = (decoder["norm.running_var"].double() + nn.BatchNorm1d(1).eps).rsqrt()
        folded = weight.double() * scale
        bias = (bias.double() - folded @ decoder["norm.running_mean"].double()).to(bias.dtype)
        weight = folded.to(weight.dtype)
    return {"classifier.weight": weight, "classifier.bias": bias}


def load_into_timm_model(model: nn.Module, settings: dict[str, Any] | None, path: str) -> None:
    """Loads a file of this package into timm's Mobile-Former, which takes RGB images in [0, 1].

    The classifier is loaded if the file has one of the same shape; mean and std of ``settings``,
    timm's ``pretrained_cfg``, become the file's. A ``UserError`` if the backbone does not fit.
    """
    state, info = read_weights(path)
    stored = {name: tensor.float() for name, tensor in names_for_timm(state).items()}
    own = model.state_dict()
    for name in _LINEAR & set(stored):
        if name not in own or stored[name].shape != own[name].shape:
            del stored[name]
    is_bgr = info is not None and info.pixel_format == "BGR"
    if "stem.weight" in stored and "stem.weight" in own:
        stem = stored["stem.weight"].flip(1) if is_bgr else stored["stem.weight"]
        if stem.shape[1] != own["stem.weight"].shape[1]:
            stem = adapt_input_conv(own["stem.weight"].shape[1], stem)
        stored["stem.weight"] = stem
    fitting, report = fit_weights(stored, own, file=path)
    check_complete(report)
    model.load_state_dict({**own, **fitting})
    logger.info("Loaded '%s': %s", path, report)
    if info is not None and info.pixel_mean and info.pixel_std and settings is not None:
        order = slice(None, None, -1 if is_bgr else 1)
        settings["mean"] = tuple(value / 255 for value in info.pixel_mean[order])
        settings["std"] = tuple(value / 255 for value in info.pixel_std[order])


PathManager.register_handler(TimmWeights())
