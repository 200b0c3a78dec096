# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Bare checkpoints of torchvision and timm as weights of the package's encoders, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qbheat_det.checkpoint import (
    LoadReport,
    WeightsInfo,
    bare_backbone,
    fit_weights,
    read_weights,
    save_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.classification.timm_loading import names_for_package, names_for_timm

from .targets import Target, find_target

OWN, TIMM = "MobileFormer", "timm"
"""Two more targets: the package's names for what timm has trained, and timm's for its weights."""


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        num_tensors: in the new file.
        info: what the file says of itself.
        report: of the encoder and the file; None where names alone were changed.
        target: the encoder; None likewise.
    """

    num_tensors: int
    info: WeightsInfo
    report: LoadReport | None = None
    target: Target | None = None


def convert_weights(
    weights: str,
    output: Path,
    to: str,
    *,
    overwrite: bool = False,
    pixel_mean: Sequence[float] = (),
    pixel_std: Sequence[float] = (),
) -> Conversion:
    """Writes a file of weights anew, under the names of an encoder.

    Args:
        weights: ``.safetensors``, or PyTorch's format with tensors alone.
        output: a ``.safetensors``.
        to: an encoder, see ``find_target``; or ``OWN``, or ``TIMM``.
        overwrite: whether ``output`` may exist.
        pixel_mean: mean of each channel that the weights were trained with, RGB, of images in
            0 … 255; empty for what is usual for the encoder.
        pixel_std: standard deviations, likewise.

    Raises:
        UserError: the file cannot be read, is of another network, or is not to be written.
    """
    if output.suffix != ".safetensors" or output.is_dir():
        raise UserError(f"'{output}' is no name for the new file: it must end in .safetensors")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: name another file, or ask for it with --overwrite")
    if pixel_mean and min(pixel_mean) >= 0 and max(pixel_mean) <= 1:
        raise UserError(
            f"the mean {list(pixel_mean)} is of images in 0 … 1: multiply it, and the standard "
            "deviation, by 255"
        )
    state, info = read_weights(weights)
    if to in (OWN, TIMM):
        return _rename(weights, state, info, to, output)
    target = find_target(to)
    fitting, report = _fit(weights, state, target)
    info = WeightsInfo(
        pixel_format="RGB",
        pixel_mean=tuple(pixel_mean) or target.pixel_mean,
        pixel_std=tuple(pixel_std) or target.pixel_std,
    )
    save_weights(str(output), fitting, info)
    return Conversion(len(fitting), info, report, target)


def _fit(
    weights: str, state: Mapping[str, Tensor], target: Target
) -> tuple[dict[str, Tensor], LoadReport]:
    own = target.encoder.state_dict()
    foreign = {name: target.foreign_name(name) for name in own}
    fitting, report = fit_weights(
        state,
        {foreign[name]: tensor for name, tensor in own.items()},
        file=weights,
        unbuilt=target.unused,
    )
    empty = [name for name, group in report.groups.items() if group.num_tensors and group.is_new]
    faults = report.find_faults(new_parts=True) + ([f"no {', '.join(empty)}"] if empty else [])
    if faults:
        raise UserError(
            f"'{weights}' is no {target.name}: {'; '.join(faults)}; name the network that it was "
            "saved from"
        )
    return {name: fitting[key] for name, key in foreign.items() if key in fitting}, report


def _rename(
    weights: str,
    state: Mapping[str, Tensor],
    info: WeightsInfo | None,
    to: str,
    output: Path,
) -> Conversion:
    if to == TIMM and info is not None and info.pixel_format == "BGR":
        raise UserError(
            f"'{weights}' was trained on BGR images, and timm's tools read RGB: load it in timm by "
            "pretrained_cfg_overlay={'file': …, 'custom_load': True}, which turns the channels"
        )
    renamed = names_for_package(state) if to == OWN else _names_in_timm(state)
    if not renamed:
        source = "a Mobile-Former of timm" if to == OWN else "one of the package's encoders"
        raise UserError(f"'{weights}' holds no weights of {source}")
    info = info or WeightsInfo()
    save_weights(str(output), renamed, info)
    return Conversion(len(renamed), info)


def _names_in_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    inside = bare_backbone(state) or {name: name for name in state}
    if all(short.startswith("net.") for short in inside.values()):
        return {short.removeprefix("net."): state[name] for name, short in inside.items()}
    if "tokens" not in inside.values():
        return {}
    return names_for_timm(state)
