# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Adds trained weights, in half precision, to the package's model zoo.

python -m docs.add_to_zoo --weights output/mine --name retinanet/285M_shapes \\
    --config custom/retinanet_285M_probe.yaml --summary 'Frozen RetinaNet on drawn shapes' \\
    --data 'drawn shapes' --data-licence CC0-1.0 --command 'qbheat train …' \\
    --metric AP 41.2±0.6 % 'shapes val'

Matrices become float16, and paths of this machine are removed from the config. Run
``python -m tests.model_zoo.fingerprints`` and ``python -m docs.write_zoo_table`` afterwards.
"""

import argparse
import dataclasses
import datetime
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor

from qbheat_det.checkpoint import (
    WeightsInfo,
    bare_backbone,
    find_weights,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.config import dump_config, get_cfg, get_config_path, with_values
from qbheat_det.core.environment import find_commit
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.files import hash_file, hash_tensors, write_atomically
from qbheat_det.evaluation.complexity import (
    CountingRule,
    count_detector_madds,
    count_madds,
    count_parameters,
)
from qbheat_det.model_zoo import Metric, ZooEntry, index, sources
from qbheat_det.model_zoo.index import SharedEncoder, find_entry
from qbheat_det.modeling.contracts import PretrainingObjective
from qbheat_det.tasks import DETECTION, PRETRAINING, find_task

MAX_SHIPPED = 40_000_000
"""Maximum size in bytes of all weights that are shipped with the package."""
# Only characters that are valid in all file systems and addresses.
_NAME = re.compile(r"(?=.{1,200}$)[a-z0-9][a-z0-9_]*(/[A-Za-z0-9][A-Za-z0-9_.]*)+", re.ASCII)
# Paths that are absolute, in a home folder, of Windows or a server, URLs, or that contain "..".
_PATH = re.compile(r"([/~\\]|[A-Za-z]:[\\/]|file:).*|(.*[\\/])?\.\.([\\/].*)?", re.DOTALL)
# Keys whose values are meaningful only on the machine of the run.
_KEYS_OF_THE_RUN = ("OUTPUT_DIR", "MODEL.WEIGHTS", "MODEL.CACHE_FEATURES.FOLDER")


def add_entry(
    weights: str,
    description: Mapping[str, str],
    *,
    metrics: Sequence[Metric] = (),
    encoder: str = "",
) -> ZooEntry:
    """Writes weights in half precision into the package, and adds an entry to its index.

    Args:
        weights: weights of a trained model or a bare backbone, with the config inside the file or
            in the same folder.
        description: fields of ``ZooEntry`` that are not in the file.
        metrics: metrics that were measured with the weights.
        encoder: name of the entry whose encoder was frozen in training. The encoder is not stored
            again.

    Raises:
        UserError: the weights cannot be read or do not fit their model, the name is invalid, or the
            shipped weights would be too large. Then nothing is written.
    """
    name = description["name"]
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' is not task/variant_data, such as retinanet/285M_bccd")
    get_config_path(description["config"])
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{name.replace('/', '-')}.safetensors"
        state, info = read_weights(weights)
        cfg = load_run_config(weights, device="cpu")
        info = info or WeightsInfo.from_config(cfg, iteration=0, commit="")
        save_weights(str(file), halve_precision(state), remove_machine_paths(info, cfg))
        trained = sources.open_trained(str(file), device="cpu")
        shared = None
        stored = file
        if encoder:
            shared, stored = leave_out_encoder(file, encoder)
        entry = ZooEntry(
            **description,
            commit=(info.commit or find_commit()).removesuffix("-dirty"),
            date=datetime.date.today().isoformat(),
            **describe_model(trained),
            file=file.name,
            sha256=hash_tensors(read_weights(str(file))[0]) if encoder else hash_file(file),
            size=file.stat().st_size,
            metrics=tuple(metrics),
            encoder=shared,
        )
        others = [other for other in index.list_entries() if other.name != name]
        shipped = [each for each in (*others, entry) if each.distribution is None]
        total = sum(each.stored.size for each in shipped)
        if total > MAX_SHIPPED:
            raise UserError(f"with '{name}' the weights would have {total / 1e6:.1f} MB")
        write_atomically(sources.SHIPPED / entry.stored.file, stored.read_bytes())
        write_atomically(index.INDEX_FILE, render_index([*others, entry]))
    return entry


def render_index(entries: Iterable[ZooEntry]) -> bytes:
    """Returns the content of the index file with these entries, sorted by name."""
    plain = [dataclasses.asdict(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
    return (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()


def describe_model(trained: sources.TrainedModel) -> dict[str, Any]:
    """Returns the fields ``task``, ``num_params``, ``madds`` and ``madds_input`` of an entry.

    Multiply-adds are counted by ``CountingRule.CORE``, on one image of the size in evaluation. For
    detectors, the image is in landscape orientation. For pre-training objectives, only the
    multiply-adds of the backbone are counted.
    """
    model = trained.model
    cfg = trained.cfg
    task = find_task(cfg)
    if task is not DETECTION:
        height = int(cfg.INPUT.PRETRAIN.SIZE)
        width = height
    else:
        width = int(cfg.INPUT.MAX_SIZE_TEST)
        height = int(cfg.INPUT.MIN_SIZE_TEST) or width  # 0 does not resize
    if isinstance(model, Backbone | PretrainingObjective):
        task = PRETRAINING
        backbone = model
        if not isinstance(model, Backbone):
            backbone = model.get_submodule("backbone")
        madds = count_madds(backbone, torch.zeros(1, 3, height, width))
    else:
        madds = count_detector_madds(model, height, width)
    return {
        "task": task.name,
        "num_params": count_parameters(model),
        "madds": madds.total(CountingRule.CORE),
        "madds_input": (height, width),
    }


def leave_out_encoder(file: Path, encoder: str) -> tuple[SharedEncoder, Path]:
    """Splits the encoder off a file; returns the encoder's record and the path of the part.

    Replaces the file by the join of part and encoder, as users will get it.
    """
    if find_entry(encoder).encoder:
        raise UserError(f"'{encoder}' is stored without its encoder")
    encoder_file = sources.fetch(find_entry(encoder))
    state, info = read_weights(str(file))
    assert info is not None
    backbone_names = bare_backbone(state)
    encoder_state = sources.read_encoder(encoder_file)
    for name, short in backbone_names.items():
        if short not in encoder_state or not torch.equal(state[name], encoder_state[short]):
            raise UserError(f"the encoder of '{file}' differs from '{encoder_file}' in '{name}'")
    part = file.with_suffix(".part.safetensors")
    left_out = {name: state[name].new_empty(0) for name in backbone_names}
    save_weights(str(part), {**state, **left_out}, info)
    sources.write_whole(part, encoder_file, file)
    return SharedEncoder(encoder, hash_file(part), part.stat().st_size), part


def halve_precision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors with at least two dimensions (matrices, filters) to float16.

    Vectors and scalars stay in float32. They are small, and float16 would turn some variances of
    BatchNorm into 0 or infinity. Tensors with values outside the range of float16 stay in float32.
    """
    halved = {}
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor = tensor.float()
            if tensor.dim() > 1 and tensor.half().isfinite().all():
                tensor = tensor.half()
        halved[name] = tensor
    return halved


def remove_machine_paths(info: WeightsInfo, cfg: CfgNode) -> WeightsInfo:
    """Returns a description with the config ``cfg``, without paths of the training machine."""
    cfg = with_values(cfg)
    reset_paths(cfg, get_cfg(), "")
    return dataclasses.replace(info, config=dump_config(cfg))


def reset_paths(node: CfgNode, defaults: CfgNode, prefix: str) -> None:
    """Resets the keys of a node that are paths; ``prefix`` is the node's name with a dot."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, CfgNode):
            reset_paths(value, defaults[key], f"{name}.")
        elif name in _KEYS_OF_THE_RUN or (name != "MODEL.CLASS_NAMES" and has_path(value)):
            node[key] = defaults[key]


def has_path(value: object) -> bool:
    """Returns whether a value is a path of a machine, or a list with one."""
    if isinstance(value, list | tuple):
        return any(has_path(entry) for entry in value)
    return isinstance(value, str) and _PATH.fullmatch(value) is not None


def read_metric(name: str, number: str, unit: str, data: str) -> Metric:
    """Returns the metric of the words of ``--metric``, such as "AP", "41.2±0.6", "%", "val"."""
    value, sign, spread = number.partition("±")
    return Metric(name, float(value), unit, data, sign + spread)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", required=True)
    for flag in ("name", "config", "summary", "data", "data-licence", "command"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--licence", default="Apache-2.0", help="of the weights")
    parser.add_argument(
        "--metric",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "VALUE", "UNIT", "DATA"),
    )
    parser.add_argument("--encoder", default="", help="entry whose encoder was frozen in training")
    args = vars(parser.parse_args())
    metrics = [read_metric(*words) for words in args.pop("metric")]
    weights = find_weights(args.pop("weights"))
    encoder = args.pop("encoder")
    print(exit_on_user_error(add_entry)(weights, args, metrics=metrics, encoder=encoder))


if __name__ == "__main__":
    main()
