# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts weights of other projects for this package's encoders, and downloads timm's weights.

``FORMATS`` maps the name of each encoder to a function that renames the tensors of another project.
The function raises an error if the weights are of a different network.

Importing this module lets Detectron2's path manager resolve addresses such as
``timm://resnet18.a1_in1k``. docs/architecture.md lists all sources of weights.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from detectron2.modeling import Backbone, build_backbone
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir
from torch import Tensor

from qbheat_det.config import get_cfg, with_values
from qbheat_det.config.loading import check_timm_name
from qbheat_det.core.errors import UserError, describe_download_error
from qbheat_det.core.files import check_output

from .matching import fit_weights, strip_wrappers
from .weights_file import WeightsInfo, read_weights, save_weights

logger = logging.getLogger(__name__)
_TIMM = "timm://"
# These tables map names of modules in the networks of Mobile-Former's authors
# (github.com/AAboys/MobileFormer) to names in ``MobileFormer``. After each convolution, such as
# "conv1.0", there is a BatchNorm whose number is higher by 1, here "conv1.1". "hyperN" is a dynamic
# ReLU with two linear layers.
_MF_STEM = {"tokens.weight": "tokens", "stem.0.weight": "stem.weight"}
_MF_ATTENTION = {
    "local_global.q": "mobile_to_former.query",
    "local_global.alpha.0": "mobile_to_former.gate",
    "local_global.proj": "mobile_to_former.project",
    "local_global.layer_norm": "mobile_to_former.norm",
    "global_block.q": "former.query",
    "global_block.channel_mlp": "former.project",
    "global_block.layer_norm": "former.attention_norm",
    "global_block.ffn.0": "former.mlp.0",
    "global_block.ffn.2": "former.mlp.2",
    "global_block.ffn_norm": "former.mlp_norm",
    "global_local.k": "former_to_mobile.key",
    "global_local.proj": "former_to_mobile.value",
}
_MF_BLOCKS = {  # by kind of block; the last row is the block's last convolution
    "lite": {"conv.0": "depthwise", "conv.4": "pointwise"},
    "down": {
        "conv1.0": "mobile.down",
        "hyper1": "mobile.down_act",
        "conv2.0": "mobile.down_reduce",
        "conv3.0": "mobile.depthwise",
        "hyper3": "mobile.depthwise_act",
        "conv4.0": "mobile.reduce",
    },
    "plain": {
        "conv1.0": "mobile.expand",
        "hyper1": "mobile.expand_act",
        "conv2.0": "mobile.depthwise",
        "hyper2": "mobile.depthwise_act",
        "conv3.0": "mobile.reduce",
    },
}
_MF_HEAD = {"classifier.conv.1": "expand", "classifier.conv.2": "expand.norm"}
_State = dict[str, Tensor]
_Keys = dict[str, Any]


def convert_weights(
    weights: str, output: Path, to: str, *, overwrite: bool = False
) -> tuple[str, dict[str, Any]]:
    """Copies weights to a new file in which the tensors have the names that an encoder expects.

    Args:
        weights: a ``.safetensors`` file, or a PyTorch file with only tensors.
        output: the new ``.safetensors`` file.
        to: a key of ``FORMATS``, which is the name of an encoder.
        overwrite: whether to replace ``output`` if it exists.

    Returns:
        A summary of the tensors, and the config keys that build the encoder.

    Raises:
        UserError: a file cannot be read or written, or the weights are of a different network.
    """
    check_output(output, ".safetensors", overwrite=overwrite)
    if to not in FORMATS:
        raise UserError(
            f"'{to}' is no encoder to convert weights for, expected one of {', '.join(FORMATS)}; "
            "timm's files load into the encoder timm:<model> without conversion"
        )
    stored, _ = read_weights(weights)
    state = {short: stored[name] for name, short in strip_wrappers((), stored).items()}
    converted, keys = FORMATS[to](weights, state, to)
    keys["INPUT.FORMAT"] = "RGB"
    info = WeightsInfo(
        pixel_format="RGB",
        pixel_mean=tuple(keys["MODEL.PIXEL_MEAN"]),
        pixel_std=tuple(keys["MODEL.PIXEL_STD"]),
        config=_dump(keys),
    )
    save_weights(str(output), converted, info)
    return f"{len(converted)} of {len(state)} tensors", keys


def _dump(keys: Mapping[str, Any]) -> str:
    """Returns a config with only these dotted keys, as YAML."""
    tree: dict[str, Any] = {"VERSION": 2}
    for key, value in keys.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return yaml.safe_dump(tree)


def _check_fit(weights: str, to: str, renamed: _State, network: Mapping[str, Tensor]) -> _State:
    """Returns the renamed tensors of a file that a network has.

    Raises a ``UserError`` if a tensor is missing, unexpected or of another shape.
    """
    fitting, report = fit_weights(renamed, network, file=weights)
    errors = report.find_errors(new_parts=False)
    if errors:
        raise UserError(f"'{weights}' is no {to}: {'; '.join(errors)}")
    return fitting


def _build_encoder(keys: Mapping[str, Any]) -> Backbone:
    """Builds the encoder on the meta device, because only names and shapes are needed."""
    cfg = with_values(get_cfg(), {**keys, "MODEL.BACKBONE.FREEZE_AT": 0})
    with torch.device("meta"):
        return build_backbone(cfg)


def _convert_mobile_former(
    weights: str, state: Mapping[str, Tensor], to: str
) -> tuple[_State, _Keys]:
    """Converts the ImageNet weights of Mobile-Former's authors; shapes determine the size."""
    try:
        size = find_size(state)
        renamed = convert_official(state)
    except KeyError as error:
        raise UserError(
            f"'{weights}' is not a file of Mobile-Former's authors: it has no {error}"
        ) from error
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"'{weights}' is not a network of Mobile-Former's authors: {error}"
        ) from error
    keys = {
        "MODEL.BACKBONE.NAME": to,
        "MODEL.MOBILE_FORMER.VARIANT": size,
        "MODEL.MOBILE_FORMER.OUT_FEATURES": ["s8", "s16", "s32", "s32_expanded", "tokens"],
        "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
        "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    }
    network = _build_encoder(keys).state_dict()
    return _check_fit(weights, f"{to} {size}", renamed, network), keys


def _convert_efficientnet_lite(
    weights: str, state: Mapping[str, Tensor], to: str
) -> tuple[_State, _Keys]:
    """Converts weights of ``efficientnet_lite_pytorch``.

    Its tensors have other names than timm's, but the same order and shapes.
    """
    with torch.device("meta"):
        network = timm.create_model(to.removeprefix("timm:")).state_dict()
    # The last part of a name, such as "weight", is the same in both projects.
    their_endings = [name.rpartition(".")[2] for name in state]
    timm_endings = [name.rpartition(".")[2] for name in network]
    if "_conv_stem.weight" not in state or their_endings != timm_endings:
        raise UserError(f"'{weights}' contains no weights of EfficientNet-Lite for {to}")
    renamed = dict(zip(network, state.values(), strict=True))
    fitting = _check_fit(weights, to, renamed, network)
    keys = {
        "MODEL.BACKBONE.NAME": to,
        "MODEL.TIMM.OUT_FEATURES": ["s8", "s16", "s32"],
        "MODEL.PIXEL_MEAN": [127.0] * 3,
        "MODEL.PIXEL_STD": [128.0] * 3,
    }
    encoder_names = _build_encoder(keys).state_dict()  # without the classification head
    encoder_state = {name: fitting[name.removeprefix("net.")] for name in encoder_names}
    return encoder_state, keys


def find_size(state: Mapping[str, Tensor]) -> str:
    """Returns the size ("26M" to "508M") of the network with weights of Mobile-Former's authors."""
    num_tokens = len(state["tokens.weight"])
    expanded_channels = len(state["classifier.conv.1.weight"])
    if expanded_channels == 768:
        return "151M" if num_tokens == 6 else "96M"
    sizes = {1440: "508M", 1152: "294M", 960: "214M"}
    if expanded_channels in sizes:
        return sizes[expanded_channels]
    return "52M" if _count_groups(state) == 1 else "26M"


def convert_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames weights of Mobile-Former's authors for ``MobileFormer``, without the classifier.

    The smallest network has grouped 1x1 convolutions and channel shuffles. They are replaced by
    dense convolutions with reordered channels, which have equal outputs. Raises a ``KeyError`` if a
    tensor that identifies the kind of a block is missing.
    """
    weights = dict(state)
    groups = _count_groups(state)
    new_names = {"stem.1": "stem.norm", **_MF_HEAD}  # by name of a module in ``state``
    for old, new in _MF_ATTENTION.items():  # modules after the last block have no prefix
        new_names[old] = new.replace("mobile_to_former", "last_bridge")
    channels = len(state["stem.0.weight"])
    stage = 0
    index_in_stage = 0
    num_blocks = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("features."))
    for index in range(num_blocks):
        block = f"features.{index}."
        kind = _find_kind(state, block)
        out_channels = len(state[_last_convolution(block, kind)])
        if kind == "down" or (kind == "lite" and out_channels != channels):
            stage += 1
            index_in_stage = 0
        if groups > 1:
            _undo_groups(weights, block, kind, channels, groups)
        for old, new in _name_modules(kind):
            new_names[f"{block}{old}"] = f"stages.{stage}.{index_in_stage}.{new}"
        channels = out_channels
        index_in_stage += 1
    if groups > 1:
        _make_dense(weights, "classifier.conv.1", groups, shuffle_groups=groups)
    renamed = {new: weights[old] for old, new in _MF_STEM.items()}
    for name, tensor in weights.items():
        module, _, parameter = name.rpartition(".")
        if module in new_names:
            renamed[f"{new_names[module]}.{parameter}"] = tensor
    return renamed


def _find_kind(state: Mapping[str, Tensor], block: str) -> str:
    """Returns "lite", "down" or "plain", given the prefix of a block's names."""
    for kind in _MF_BLOCKS:
        if _last_convolution(block, kind) in state:
            return kind
    raise KeyError(" or ".join(_last_convolution(block, kind) for kind in _MF_BLOCKS))


def _last_convolution(block: str, kind: str) -> str:
    """Returns the name of the weight of a block's last convolution, which only this kind has."""
    last_module = list(_MF_BLOCKS[kind])[-1]
    return f"{block}{last_module}.weight"


def _name_modules(kind: str) -> Iterator[tuple[str, str]]:
    """Yields the authors' name and our name of each module in a kind of block."""
    for old, new in _MF_BLOCKS[kind].items():
        if old.startswith("hyper"):
            yield f"{old}.hyper.0", f"{new}.squeeze"
            yield f"{old}.hyper.2", f"{new}.slopes"
        else:
            yield old, new
            parent, _, number = old.rpartition(".")
            yield f"{parent}.{int(number) + 1}", f"{new}.norm"
    if kind != "lite":
        yield from _MF_ATTENTION.items()


def _count_groups(state: Mapping[str, Tensor]) -> int:
    """Returns the number of groups of the 1x1 convolutions; 1 in all networks but the smallest."""
    hidden_channels = len(state["features.0.conv.0.weight"])
    channels_per_group = state["features.0.conv.4.weight"].shape[1]
    return hidden_channels // channels_per_group


def _undo_groups(
    weights: dict[str, Tensor], block: str, kind: str, channels: int, groups: int
) -> None:
    """Makes the 1x1 convolutions of a block dense, and removes its channel shuffles, in place.

    Args:
        weights: the tensors of the network.
        block: prefix of the block's names.
        kind: "lite", "down" or "plain".
        channels: number of the block's input channels.
        groups: number of groups of the 1x1 convolutions.
    """
    if kind == "lite":  # depthwise convolution, shuffle, 1x1 convolution
        _make_dense(weights, f"{block}conv.4", groups, shuffle_groups=channels)
    elif kind == "down":  # twice: depthwise convolution, shuffle, dynamic ReLU, 1x1 convolution
        reduced_channels = len(weights[f"{block}conv2.0.weight"])
        _make_dense(weights, f"{block}conv2.0", groups, shuffle_groups=channels)
        _unshuffle_slopes(weights, f"{block}hyper1.hyper.2", channels)
        _make_dense(weights, f"{block}conv4.0", groups, shuffle_groups=reduced_channels)
        _unshuffle_slopes(weights, f"{block}hyper3.hyper.2", reduced_channels)
    else:  # 1x1 convolutions before and after a depthwise convolution, each with a shuffle after it
        for convolution in ("conv1", "conv3"):
            _make_dense(weights, f"{block}{convolution}.0", groups, shuffle_groups=1)
            # Compute the outputs of the convolution and its BatchNorm in the shuffled order.
            order = _shuffle(len(weights[f"{block}{convolution}.0.weight"]), groups)
            for name, tensor in list(weights.items()):
                has_channels = tensor.dim() > 0  # BatchNorm's counter has none
                if name.startswith(f"{block}{convolution}.") and has_channels:
                    weights[name] = tensor[order]


def _make_dense(weights: dict[str, Tensor], name: str, groups: int, *, shuffle_groups: int) -> None:
    """Makes a grouped 1x1 convolution dense, and includes the shuffle of its input, in place.

    ``shuffle_groups`` is the number of groups of the shuffle before the convolution; 1 if there is
    none. The new convolution takes the channels in the order before the shuffle.
    """
    blocks = weights[f"{name}.weight"][:, :, 0, 0].chunk(groups)  # of (C_out / G, C_in / G)
    dense = torch.block_diag(*blocks)  # (C_out, C_in)
    order = _shuffle(dense.shape[1], shuffle_groups)
    weights[f"{name}.weight"] = dense[:, order.argsort(), None, None].contiguous()


def _unshuffle_slopes(weights: dict[str, Tensor], name: str, shuffle_groups: int) -> None:
    """Reorders the outputs of a dynamic ReLU's last layer to the channels before the shuffle."""
    for parameter in ("weight", "bias"):
        slopes = weights[f"{name}.{parameter}"].unflatten(0, (2, -1))  # (2, C, …): 2 slopes each
        order = _shuffle(slopes.shape[1], shuffle_groups)
        weights[f"{name}.{parameter}"] = slopes[:, order.argsort()].flatten(0, 1)


def _shuffle(channels: int, groups: int) -> Tensor:
    """Returns (channels,): for each output position, the channel that a shuffle moves there.

    A shuffle arranges the channels as a matrix (groups, channels / groups) and transposes it.
    """
    return torch.arange(channels).view(groups, -1).t().flatten()


FORMATS: dict[str, Callable[[str, Mapping[str, Tensor], str], tuple[_State, _Keys]]] = {
    "MobileFormer": _convert_mobile_former,
    **{f"timm:tf_efficientnet_lite{number}": _convert_efficientnet_lite for number in range(5)},
}
"""Maps the name of an encoder to the function that converts weights for it.

A function takes the path of a file (for messages), the file's tensors, and the name of the encoder.
It returns the encoder's tensors, and the values of the config keys that build the encoder."""


class TimmWeights(PathHandler):
    """Resolves ``timm://<model>`` and ``timm://<model>.<tag>`` to a local file.

    Weights are downloaded once, and stored in the cache folder with their pixel statistics.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return [_TIMM]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = path.removeprefix(_TIMM)
        model_name, _, tag = name.partition(".")
        check_timm_name(model_name)
        tags = timm.list_pretrained(f"{model_name}.*")
        if tag and name not in tags:
            raise UserError(f"timm has no weights '{name}', but {', '.join(tags) or 'none'}")
        folder = Path(get_cache_dir()) / "timm"
        file = folder / f"{name}.safetensors"
        try:
            published = timm.get_pretrained_cfg(name)  # with the default tag if the name has none
            published_tag = published.tag if published else ""
            file = folder / f"{model_name}.{published_tag}.safetensors"
            if file.is_file() and not force:
                return str(file)
            logger.info("Downloading timm's weights '%s' to '%s'", name, file)
            model = timm.create_model(file.stem, pretrained=True)
        except Exception as error:  # due to the name, the hub, the network or the file
            raise UserError(
                f"timm's weights '{name}' could not be downloaded: "
                f"{describe_download_error(error)}; without a network, load them on another "
                f"machine, and copy '{file.name}' from its cache to '{folder}'; or use one of "
                "`qbheat zoo list 'timm/*'`, whose weights are in Python's package index"
            ) from error
        info = WeightsInfo(
            pixel_format="RGB",
            pixel_mean=tuple(255 * float(value) for value in model.pretrained_cfg["mean"]),
            pixel_std=tuple(255 * float(value) for value in model.pretrained_cfg["std"]),
        )
        save_weights(str(file), model.state_dict(), info)
        return str(file)


PathManager.register_handler(TimmWeights())
