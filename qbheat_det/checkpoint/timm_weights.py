# Copyright (c) qbheat_det contributors. Apache-2.0.
"""timm's published weights by address: ``MODEL.WEIGHTS: "timm://resnet18.a1_in1k"``.

Importing this module makes Detectron2's path manager understand such addresses. They are fetched
once, by timm, and kept beside what Detectron2 fetches; nothing else in the package downloads
weights of timm. As files of weights they state the pixels that they were trained on, so that
another normalisation is noticed when they are loaded.
"""

import logging
from pathlib import Path
from typing import Any

import timm
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir

from qbheat_det.config.rules import check_timm_name
from qbheat_det.core.errors import UserError

from .weights_file import save_weights
from .weights_info import WeightsInfo

logger = logging.getLogger(__name__)
_PREFIX = "timm://"


class TimmWeights(PathHandler):
    """From ``timm://<model>`` or ``timm://<model>.<tag>`` to a file on this machine."""

    def _get_supported_prefixes(self) -> list[str]:
        return [_PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = _in_full(path.removeprefix(_PREFIX))
        file = Path(get_cache_dir()) / "timm" / f"{name}.safetensors"
        if force or not file.is_file():
            _fetch(name, file)
        return str(file)


def _in_full(name: str) -> str:
    """Adds the tag that timm takes where none is named.

    Raises:
        UserError: there is no such model, or there are no such weights of it.
    """
    model, _, tag = name.partition(".")
    check_timm_name(model)
    published = timm.list_models(f"{model}.*", pretrained=True)
    if not tag:
        default = timm.models.get_pretrained_cfg(model)
        name = f"{model}.{default.tag}" if default else name
    if name not in published:
        raise UserError(
            f"timm has no weights '{name}'; for this model there are "
            f"{', '.join(published) or 'none: leave MODEL.WEIGHTS empty'}"
        )
    return name


def _fetch(name: str, file: Path) -> None:
    logger.info("Fetching timm's weights '%s' to '%s'", name, file)
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # of the hub, of the network below it, of the file
        reason = " ".join(str(error).split("\n", 1)[0].split())
        raise UserError(
            f"timm's weights '{name}' could not be fetched ({reason}): where there is no network, "
            f"copy '{file}' from a machine that has fetched them, or name a file of weights in "
            "MODEL.WEIGHTS"
        ) from error
    settings = model.pretrained_cfg
    info = WeightsInfo(
        pixel_format="RGB",
        pixel_mean=tuple(255 * float(value) for value in settings["mean"]),
        pixel_std=tuple(255 * float(value) for value in settings["std"]),
    )
    save_weights(str(file), model.state_dict(), info)


PathManager.register_handler(TimmWeights())
