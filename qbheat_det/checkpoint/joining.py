# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Joins the weights of detectors on one frozen encoder into those of one detector.

Nothing is trained. The new file has the encoder once, and the feature pyramid and head of each
detector unchanged; see ``modeling/joined.py``. Tensors of the encoder are named
"backbone.bottom_up.…", and the others of detector i "detectors.i.…".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, build_model
from torch import Tensor, nn

from qbheat_det.config import dump_config, get_value, refuse_bad_values, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_output
from qbheat_det.modeling.contracts import SupportsKeptClasses, get_backbone, get_encoder

from .checkpointer import ExactCheckpointer
from .matching import BELOW_FPN, bare_backbone, strip_wrappers
from .run_config import load_run_config
from .weights_file import WeightsInfo, find_weights, read_weights, save_weights

JOINED = "JoinedDetectors"
"""``MODEL.META_ARCHITECTURE`` of the new file."""
_PARTS = "MODEL.JOINED.PARTS"
_CLASS_INDICES = "MODEL.JOINED.CLASS_INDICES"
_LIMIT = "TEST.DETECTIONS_PER_IMAGE"
_DETECTOR = "detectors.{}."
# Keys below MODEL that do not change what a trained detector predicts, or that the join sets.
_NOT_COMPARED = (
    "MODEL.BACKBONE.FREEZE_AT",
    "MODEL.CACHE_FEATURES.",
    "MODEL.CATEGORY_IDS",
    "MODEL.CLASS_NAMES",
    "MODEL.DEVICE",
    "MODEL.JOINED.",
    "MODEL.KEEP_CLASSES.",
    "MODEL.SEMI.",
    "MODEL.TIMM.FREEZE_NORMS",
    "MODEL.WEIGHTS",
)
# Keys that must be equal, and how to make them so.
_RETRAIN = "train all heads on one encoder, with the same pixel statistics and channel order"
_NAME = "name the key and its value at the end of the command"
_RESIZE = "train the new detector with --freeze and the --weights of the old one"
_EQUAL_KEYS = {
    "INPUT.FORMAT": _RETRAIN,
    "MODEL.PIXEL_MEAN": _RETRAIN,
    "MODEL.PIXEL_STD": _RETRAIN,
    "INPUT.MIN_SIZE_TEST": _RESIZE,
    "INPUT.MAX_SIZE_TEST": _RESIZE,
    "INPUT.TILE": _NAME,
}


@dataclass(frozen=True)
class _Part:
    """A detector to join.

    Attributes:
        weights: what the user has named it.
        cfg: its config.
        info: the metadata of its file.
        encoder: the encoder's tensors, by name without prefix.
        heads: the other tensors, by name in the detector; for a joined detector, those of each.
        layers: what the layers of the encoder compute, by name.
    """

    weights: str
    cfg: CfgNode
    info: WeightsInfo
    encoder: Mapping[str, Tensor]
    heads: Sequence[Mapping[str, Tensor]]
    layers: Mapping[str, str]


@dataclass(frozen=True)
class _Classes:
    """The classes of a joined detector.

    Attributes:
        names: their names.
        ids: their ids in annotation files.
        indices: for each head, the index of each of its classes in ``names``, or -1.
        found_once: as in ``JoinedFile``.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    indices: Sequence[Sequence[int]]
    found_once: Mapping[str, str]


@dataclass(frozen=True)
class JoinedFile:
    """What ``join_detectors`` has written.

    Attributes:
        class_names: the classes of the joined detector.
        found_once: for a class that several files have, the file whose detector finds it.
    """

    class_names: tuple[str, ...]
    found_once: Mapping[str, str]


def join_detectors(
    weights: Sequence[str], output: Path, *, overwrite: bool = False, opts: Sequence[str] = ()
) -> JoinedFile:
    """Writes detectors of the same encoder as one detector with the classes of all.

    Args:
        weights: names that ``find_weights`` accepts: runs, files or entries of the model zoo. If
            two of them have a class of the same name, the first one finds it.
        output: the new ``.safetensors`` file.
        overwrite: whether to replace ``output`` if it exists.
        opts: overrides of all configs, as alternating keys and values.

    Raises:
        UserError: there are not two detectors, their encoders or images differ, or a file cannot be
            read or written.
    """
    check_output(output, ".safetensors", overwrite=overwrite)
    if len(weights) < 2:
        raise UserError("name at least two detectors to join")
    parts = [_read_part(name, opts) for name in weights]
    for part in parts[1:]:
        _check_same_encoder(parts[0], part)

    classes = _assign_classes(parts)
    heads: dict[str, Tensor] = {}
    for index, head in enumerate(head for part in parts for head in part.heads):
        prefix = _DETECTOR.format(index)
        heads |= {prefix + name: tensor for name, tensor in head.items()}

    cfg = with_values(
        parts[0].cfg,
        {
            "MODEL.META_ARCHITECTURE": JOINED,
            "MODEL.CLASS_NAMES": list(classes.names),
            "MODEL.CATEGORY_IDS": list(classes.ids),
            "MODEL.CACHE_FEATURES.ENABLED": False,
            "MODEL.KEEP_CLASSES.NUM": 0,
            "SOLVER.FIRST_STAGE": "",
            _LIMIT: sum(part.cfg.TEST.DETECTIONS_PER_IMAGE for part in parts),
            _PARTS: _list_part_values(parts),
            _CLASS_INDICES: [list(indices) for indices in classes.indices],
        },
    )
    model = build_model(cfg)  # also checks that the detectors fit together
    # The encoder with the most outputs may be that of any part.
    encoder = {name: tensor for part in parts for name, tensor in part.encoder.items()}
    state = {
        name: encoder[name.removeprefix(BELOW_FPN)]
        for name in model.state_dict()
        if name.startswith(BELOW_FPN) and name.removeprefix(BELOW_FPN) in encoder
    }
    info = WeightsInfo(
        class_names=classes.names,
        category_ids=classes.ids,
        pixel_format=parts[0].info.pixel_format,
        pixel_mean=parts[0].info.pixel_mean,
        pixel_std=parts[0].info.pixel_std,
        config=dump_config(cfg),
        iteration=max(part.info.iteration for part in parts),
    )
    save_weights(str(output), {**state, **heads}, info)
    return JoinedFile(classes.names, classes.found_once)


def _assign_classes(parts: Sequence[_Part]) -> _Classes:
    """Joins the classes of the parts.

    Raises:
        UserError: other parts find all classes of a part.
    """
    ids: dict[str, int] = {}  # by name, in the order of the joined detector
    owners: dict[str, str] = {}
    found_once: dict[str, str] = {}
    of_heads: list[list[int]] = []
    for part in parts:
        indices: list[int] = []
        for name, category_id in zip(part.info.class_names, part.info.category_ids, strict=True):
            if name in owners:
                found_once[name] = owners[name]
                indices.append(-1)
                continue
            owners[name] = part.weights
            indices.append(len(ids))
            ids[name] = category_id
        if max(indices) < 0:
            raise UserError(
                f"the other detectors find all classes of '{part.weights}': leave it out"
            )
        of_heads.extend(_list_indices(part, indices))
    if len(set(ids.values())) < len(ids):
        ids = {name: number for number, name in enumerate(ids, start=1)}
    return _Classes(tuple(ids), tuple(ids.values()), of_heads, found_once)


def _read_part(weights: str, opts: Sequence[str]) -> _Part:
    """Reads a detector.

    Raises:
        UserError: it cannot be joined, or the weights do not fit their config.
    """
    file = find_weights(weights)
    cfg = load_run_config(file, device="cpu", opts=opts)
    stored, info = read_weights(file)
    if info is None or not info.class_names:
        raise UserError(
            f"'{weights}' names no classes; it must be a detector that this package has trained"
        )
    names = info.class_names
    if len(set(names)) < len(names) or len(info.category_ids) != len(names):
        raise UserError(f"'{weights}' must have a name and an id of its own for each class")
    architecture = cfg.MODEL.META_ARCHITECTURE
    is_known = architecture == JOINED or (
        architecture in META_ARCH_REGISTRY
        and issubclass(META_ARCH_REGISTRY.get(architecture), SupportsKeptClasses)
    )
    if not is_known:
        raise UserError(
            f"'{weights}': {architecture} cannot be joined; RetinaNet, FCOS and MF-DETR can"
        )
    with refuse_bad_values(f"the config of '{weights}'"):
        model = build_model(cfg)
    ExactCheckpointer(model, class_names=names, is_quiet=True).load(file, checkpointables=[])
    backbone = get_backbone(model)
    assert backbone is not None  # ``SupportsKeptClasses`` have one
    encoder_names = bare_backbone(stored)
    encoder = {short: stored[name] for name, short in encoder_names.items()}
    short_names = strip_wrappers((), stored)
    others = {
        short: stored[name] for name, short in short_names.items() if name not in encoder_names
    }
    heads = [others]
    if architecture == JOINED:
        heads = []
        for index in range(len(cfg.MODEL.JOINED.PARTS)):
            prefix = _DETECTOR.format(index)
            of_head = [name for name in others if name.startswith(prefix)]
            heads.append({name.removeprefix(prefix): others[name] for name in of_head})
    return _Part(weights, cfg, info, encoder, heads, _describe_layers(get_encoder(backbone)))


def _describe_layers(encoder: nn.Module) -> dict[str, str]:
    """Returns what each layer of an encoder computes in inference, by name.

    Frozen and other BatchNorms compute the same.
    """
    layers = {}
    for name, layer in encoder.named_modules():
        eps = getattr(layer, "eps", None)
        if eps is not None:
            layers[name] = f"a norm with eps {eps}"
        elif not list(layer.children()):
            layers[name] = repr(layer)
    return layers


def _check_same_encoder(first: _Part, other: _Part) -> None:
    """Checks that two detectors read outputs of the same encoder on the same images.

    One of the encoders may lack layers of outputs that its detector does not read.
    """
    names = f"'{first.weights}' and '{other.weights}' cannot be joined"
    for key, advice in _EQUAL_KEYS.items():
        ours = get_value(first.cfg, key)
        theirs = get_value(other.cfg, key)
        if ours != theirs:
            raise UserError(f"{names}: {key} is {ours} and {theirs}; {advice}")
    smaller, larger = sorted([first, other], key=lambda part: len(part.encoder))
    for name, tensor in smaller.encoder.items():
        if name.endswith("num_batches_tracked"):
            continue
        counterpart = larger.encoder.get(name)
        if counterpart is not None and tensor.float().equal(counterpart.float()):
            continue
        if counterpart is not None and tensor.half().equal(counterpart.half()):
            raise UserError(
                f"{names}: one of their encoders is in half precision; use one precision"
            )
        raise UserError(
            f"{names}: '{name}' of their encoders differs. Train each head from the same weights "
            "with --freeze, or a new head from the weights of the first detector"
        )
    for name, layer in smaller.layers.items():
        if larger.layers.get(name) != layer:
            raise UserError(
                f"{names}: their encoders have the same tensors, but compute them in other ways: "
                f"'{name}' is {layer} and {larger.layers.get(name)}"
            )


def _list_indices(part: _Part, indices: Sequence[int]) -> Iterator[list[int]]:
    """Returns the class indices of each head of a part, whose own classes have ``indices``."""
    if part.cfg.MODEL.META_ARCHITECTURE != JOINED:
        yield list(indices)
        return
    for of_head in part.cfg.MODEL.JOINED.CLASS_INDICES:
        yield [indices[index] if index >= 0 else -1 for index in of_head]


def _list_part_values(parts: Sequence[_Part]) -> list[dict[str, Any]]:
    """Returns the values of each head's config that differ from those of another head.

    Raises:
        UserError: thresholds of inference differ.
    """
    configs: list[CfgNode] = []
    for part in parts:
        if part.cfg.MODEL.META_ARCHITECTURE == JOINED:
            configs.extend(with_values(part.cfg, values) for values in part.cfg.MODEL.JOINED.PARTS)
        else:
            configs.append(part.cfg)
    keys = ["MODEL.META_ARCHITECTURE", _LIMIT]
    for key in _list_keys(configs[0].MODEL, "MODEL."):
        values = [get_value(cfg, key) for cfg in configs]
        is_number = key.endswith(".NUM_CLASSES")  # evaluation sets it to the number of all classes
        differs = any(value != values[0] for value in values)
        if differs and key.endswith("_TEST"):  # as overrides of a part would have no effect
            raise UserError(f"the detectors have different {key}, {values}; {_NAME}")
        if (differs and not key.startswith(_NOT_COMPARED)) or is_number:
            keys.append(key)
    return [{key: get_value(cfg, key) for key in dict.fromkeys(keys)} for cfg in configs]


def _list_keys(node: CfgNode, prefix: str) -> Iterator[str]:
    """Yields the dotted keys of all values of a config."""
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _list_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key
