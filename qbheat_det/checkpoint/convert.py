# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts weights of other projects for this package's encoders, and downloads timm's weights.

``FORMATS`` has a function for each encoder. It renames the tensors of another project, and refuses
weights of a different network. Importing this module lets Detectron2's path manager resolve
addresses such as ``timm://resnet18.a1_in1k``. docs/architecture.md lists all sources of weights.
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

from qbheat_det.config import get_cfg
from qbheat_det.config.loading import check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_output
from qbheat_det.core.text import one_line

from .matching import fit_weights, strip_wrappers
from .weights_file import WeightsInfo, read_weights, save_weights

logger = logging.getLogger(__name__)
_TIMM = "timm://"
# Maps module names of the networks of Mobile-Former's authors (github.com/AAboys/MobileFormer) to
# module names of ``MobileFormer``. Modules of blocks are listed by kind of block. Each convolution
# "name.N" has a BatchNorm "name.N+1". "hyperN" has the two layers of a dynamic ReLU.
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
_MF_BLOCKS = {
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
    state, _ = read_weights(weights)
    state = {short: state[name] for name, short in strip_wrappers((), state).items()}
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
    """Returns a config with only these keys, as YAML."""
    tree: dict[str, Any] = {"VERSION": 2}
    for key, value in keys.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return yaml.safe_dump(tree)


def _check_fit(weights: str, to: str, renamed: _State, network: Mapping[str, Tensor]) -> _State:
    """Returns the tensors that fit the tensors of a network.

    Raises a ``UserError`` if one is missing, unexpected or of another shape.
    """
    fitting, report = fit_weights(renamed, network, file=weights)
    errors = report.find_errors(new_parts=False)
    if errors:
        raise UserError(f"'{weights}' is no {to}: {'; '.join(errors)}")
    return fitting


def _build_encoder(keys: Mapping[str, Any]) -> Backbone:
    """Builds the encoder on the meta device, as only names and shapes are needed."""
    cfg = get_cfg()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
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
    """Converts weights of ``efficientnet_lite_pytorch``, which have timm's order and shapes."""
    with torch.device("meta"):
        network = timm.create_model(to.removeprefix("timm:")).state_dict()
    # The last part of a name, such as "weight", is the same in both projects.
    has_equal_kinds = len(state) == len(network) and all(
        theirs.rpartition(".")[2] == ours.rpartition(".")[2]
        for theirs, ours in zip(state, network, strict=True)
    )
    if "_conv_stem.weight" not in state or not has_equal_kinds:
        raise UserError(f"'{weights}' contains no weights of EfficientNet-Lite for {to}")
    renamed = dict(zip(network, state.values(), strict=True))
    fitting = _check_fit(weights, to, renamed, network)
    keys = {
        "MODEL.BACKBONE.NAME": to,
        "MODEL.TIMM.OUT_FEATURES": ["s8", "s16", "s32"],
        "MODEL.PIXEL_MEAN": [127.0] * 3,
        "MODEL.PIXEL_STD": [128.0] * 3,
    }
    kept = _build_encoder(keys).state_dict()  # without the head
    return {name: fitting[name.removeprefix("net.")] for name in kept}, keys


def find_size(state: Mapping[str, Tensor]) -> str:
    """Returns the size ("26M" to "508M") of the network with weights of Mobile-Former's authors."""
    num_tokens = len(state["tokens.weight"])
    expanded = len(state["classifier.conv.1.weight"])
    if expanded == 768:
        return "151M" if num_tokens == 6 else "96M"
    sizes = {1440: "508M", 1152: "294M", 960: "214M"}
    if expanded in sizes:
        return sizes[expanded]
    return "52M" if _count_groups(state) == 1 else "26M"


def convert_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames weights of Mobile-Former's authors for ``MobileFormer``, without the classifier.

    The smallest network has grouped 1x1 convolutions and channel shuffles. They are replaced by
    dense convolutions with reordered channels, which have equal outputs. Raises a ``KeyError`` if a
    tensor that identifies the kind of a block is missing.
    """
    weights = dict(state)
    groups = _count_groups(state)
    modules = {"stem.1": "stem.norm", **_MF_HEAD}
    modules |= {k: v.replace("mobile_to_former", "last_bridge") for k, v in _MF_ATTENTION.items()}
    channels = len(state["stem.0.weight"])
    stage = 0
    place = 0  # of the block in its stage
    num_blocks = 1 + max(int(n.split(".")[1]) for n in state if n.startswith("features."))
    for index in range(num_blocks):
        block = f"features.{index}."
        # The last convolution of a block identifies its kind.
        last = {kind: f"{block}{list(names)[-1]}.weight" for kind, names in _MF_BLOCKS.items()}
        kind = next((kind for kind, name in last.items() if name in state), "")
        if not kind:
            raise KeyError(" or ".join(last.values()))
        out_channels = len(state[last[kind]])
        if kind == "down" or (kind == "lite" and out_channels != channels):
            stage += 1
            place = 0
        if groups > 1:
            _undo_groups(weights, block, kind, channels, groups)
        for theirs, ours in _name_modules(kind):
            modules[f"{block}{theirs}"] = f"stages.{stage}.{place}.{ours}"
        channels = out_channels
        place += 1
    if groups > 1:
        _make_dense(weights, "classifier.conv.1", groups, shuffled_by=groups)
    renamed = {ours: weights[theirs] for theirs, ours in _MF_STEM.items()}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if module in modules:
            renamed[f"{modules[module]}.{kind}"] = tensor
    return renamed


def _name_modules(kind: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of names, the authors' and ours, for the modules in a kind of block."""
    for theirs, ours in _MF_BLOCKS[kind].items():
        if theirs.startswith("hyper"):
            yield f"{theirs}.hyper.0", f"{ours}.squeeze"
            yield f"{theirs}.hyper.2", f"{ours}.slopes"
        else:
            stem, _, number = theirs.rpartition(".")
            yield theirs, ours
            yield f"{stem}.{int(number) + 1}", f"{ours}.norm"
    if kind != "lite":
        yield from _MF_ATTENTION.items()


def _count_groups(state: Mapping[str, Tensor]) -> int:
    hidden = state["features.0.conv.0.weight"]
    reduce = state["features.0.conv.4.weight"]
    return len(hidden) // reduce.shape[1]


def _undo_groups(
    weights: dict[str, Tensor], block: str, kind: str, channels: int, groups: int
) -> None:
    """Makes the 1x1 convolutions of a block dense, and reorders channels instead of shuffling."""
    if kind == "lite":
        _make_dense(weights, f"{block}conv.4", groups, shuffled_by=channels)
    elif kind == "down":
        reduced = len(weights[f"{block}conv2.0.weight"])
        for act, conv, inputs in (("hyper1", "conv2", channels), ("hyper3", "conv4", reduced)):
            _make_dense(weights, f"{block}{conv}.0", groups, shuffled_by=inputs)
            for part in ("weight", "bias"):  # both slopes of each channel
                slopes = weights[f"{block}{act}.hyper.2.{part}"].unflatten(0, (2, -1))
                order = _shuffle(slopes.shape[1], inputs)
                weights[f"{block}{act}.hyper.2.{part}"] = slopes[:, order.argsort()].flatten(0, 1)
    else:
        for conv in ("conv1", "conv3"):
            _make_dense(weights, f"{block}{conv}.0", groups)
            order = _shuffle(len(weights[f"{block}{conv}.0.weight"]), groups)
            for name, tensor in list(weights.items()):
                if name.startswith(f"{block}{conv}.") and tensor.dim():
                    weights[name] = tensor[order]


def _make_dense(weights: dict[str, Tensor], name: str, groups: int, shuffled_by: int = 1) -> None:
    """Makes a grouped 1x1 convolution dense. Its input has the channels before the shuffle."""
    blocks = weights[f"{name}.weight"][:, :, 0, 0].chunk(groups)
    dense = torch.block_diag(*blocks)
    order = _shuffle(dense.shape[1], shuffled_by)
    weights[f"{name}.weight"] = dense[:, order.argsort(), None, None].contiguous()


def _shuffle(channels: int, groups: int) -> Tensor:
    """Returns (channels,): for each output position, the channel that a shuffle moves there."""
    return torch.arange(channels).view(groups, -1).t().flatten()


FORMATS: dict[str, Callable[[str, Mapping[str, Tensor], str], tuple[_State, _Keys]]] = {
    "MobileFormer": _convert_mobile_former,
    **{f"timm:tf_efficientnet_lite{number}": _convert_efficientnet_lite for number in range(5)},
}
"""Maps encoders to functions that take the name of a file (for messages), its tensors and the
encoder's name. They return the encoder's tensors, and the config keys that build the encoder."""


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
            published = timm.get_pretrained_cfg(name)  # the default tag if the name has none
            tag = ""
            if published:
                tag = published.tag
            file = folder / f"{model_name}.{tag}.safetensors"
            if file.is_file() and not force:
                return str(file)
            logger.info("Downloading timm's weights '%s' to '%s'", name, file)
            model = timm.create_model(file.stem, pretrained=True)
        except Exception as error:  # due to the name, the hub, the network or the file
            raise UserError(
                f"timm's weights '{name}' could not be downloaded ({one_line(error)}): copy "
                f"'{file.name}' from '{folder}' of another machine; `qbheat zoo list 'timm/*'` has "
                "networks whose weights are in Python's package index"
            ) from error
        info = WeightsInfo(
            pixel_format="RGB",
            pixel_mean=tuple(255 * float(value) for value in model.pretrained_cfg["mean"]),
            pixel_std=tuple(255 * float(value) for value in model.pretrained_cfg["std"]),
        )
        save_weights(str(file), model.state_dict(), info)
        return str(file)


PathManager.register_handler(TimmWeights())
