# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads weights (``.safetensors``, PyTorch's or Detectron2's files) and writes them, with metadata.

Reading never runs code from a file. All paths may also be addresses that Detectron2's path manager
resolves, such as ``qbheat://retinanet/285M_bccd`` or ``detectron2://ImageNetPretrained/…``.
"""

import dataclasses
import functools
import json
import os
import pickle
import typing
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import yaml
from detectron2.config import CfgNode
from detectron2.utils.file_io import PathManager
from torch import Tensor

from qbheat_det.config import dump_config
from qbheat_det.config.loading import TIMM_PREFIX
from qbheat_det.core.errors import UserError, describe_download_error, refuse_unreadable
from qbheat_det.core.files import parse_record, write_atomically
from qbheat_det.core.yaml_text import load_yaml

from .detectron2_files import read_detectron2_file

# The metadata are one JSON text under a single key, because safetensors writes several keys in
# random order, and equal weights should give equal files.
_METADATA_KEY = "qbheat_det"
_ZOO = "qbheat://"
BEST_WEIGHTS = "model_best.safetensors"
"""File in the folder of a run with the weights that were the best by validation."""
LAST_WEIGHTS = "model_final.safetensors"
"""File in the folder of a run with the weights after the last step."""
# Suffixes that identify a file. Names in the model zoo have none, but can have a dot, as in "1.0G".
_SUFFIXES = (".safetensors", ".pth", ".pt", ".pkl", ".pickle", ".bin", ".onnx", ".pt2")
# Keys under which training scripts store weights; plain weights come before moving averages.
_STATE_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "model_ema",
    "state_dict_ema",
    "ema_state_dict",
)


@dataclass(frozen=True)
class WeightsInfo:
    """The metadata that are stored in a file of weights.

    Attributes:
        class_names: names of the classes, in contiguous order.
        category_ids: ids of the classes in the annotation file, in the same order.
        pixel_format: channel order of the model's images, "BGR" or "RGB".
        pixel_mean: mean of each channel, in this order.
        pixel_std: standard deviation of each channel, in this order.
        config: the whole config as YAML.
        commit: git commit of the code that trained the weights.
        iteration: the last completed iteration, from 0; -1 for weights that were not trained.
        pretrain_only_modules: names of child modules that are loaded only into a model of the same
            architecture.
        images_seen_before: number of images seen in the runs before, from whose weights the run
            started; 0 if it started from random weights, or the number is unknown.
    """

    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    pixel_format: str = ""
    pixel_mean: tuple[float, ...] = ()
    pixel_std: tuple[float, ...] = ()
    config: str = ""
    commit: str = ""
    iteration: int = 0
    pretrain_only_modules: tuple[str, ...] = ()
    images_seen_before: int = 0

    @classmethod
    def from_config(
        cls,
        cfg: CfgNode,
        *,
        iteration: int,
        commit: str,
        pretrain_only_modules: Sequence[str] = (),
        images_seen_before: int = 0,
    ) -> "WeightsInfo":
        """Builds the metadata of a run from its resolved config and the arguments."""
        return cls(
            class_names=tuple(map(str, cfg.MODEL.CLASS_NAMES)),
            category_ids=tuple(map(int, cfg.MODEL.CATEGORY_IDS)),
            pixel_format=str(cfg.INPUT.FORMAT),
            pixel_mean=tuple(map(float, cfg.MODEL.PIXEL_MEAN)),
            pixel_std=tuple(map(float, cfg.MODEL.PIXEL_STD)),
            config=dump_config(cfg),
            commit=commit,
            iteration=iteration,
            pretrain_only_modules=tuple(pretrain_only_modules),
            images_seen_before=images_seen_before,
        )

    def value_of(self, key: str) -> object:
        """Returns the value of a key such as "MODEL.DEVICE" in the stored config, or None."""
        value = _parse_config(self.config)
        for part in key.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(part)
        return value

    @property
    def images_seen(self) -> int | None:
        """Number of images seen in all runs: iterations x batch size. None if unknown."""
        batch_size = self.value_of("SOLVER.IMS_PER_BATCH")
        if not isinstance(batch_size, int):
            return None
        return self.images_seen_before + (self.iteration + 1) * batch_size

    @property
    def timm_name(self) -> str:
        """timm's name of the network that was trained; "" if the network is not from timm."""
        name = str(self.value_of("MODEL.BACKBONE.NAME"))
        if name == "build_fpn_backbone":
            name = str(self.value_of("MODEL.FPN.BOTTOM_UP"))
        if not name.startswith(TIMM_PREFIX):
            return ""
        return name.removeprefix(TIMM_PREFIX)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as strings, numbers and lists, for JSON and checkpoints."""
        content = {}
        for key, value in dataclasses.asdict(self).items():
            content[key] = list(value) if isinstance(value, tuple) else value
        return content

    @classmethod
    def from_dict(cls, content: object) -> "WeightsInfo | None":
        """Reads the output of ``to_dict`` from an untrusted file; None if a field is invalid."""
        if not isinstance(content, dict):
            return None
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: content[name] for name in names if name in content}
        is_untrained = known.get("iteration") == -1
        if is_untrained:  # ``parse_record`` refuses negative integers
            known["iteration"] = 0
        try:
            info = typing.cast(WeightsInfo, parse_record(cls, known, "the description"))
        except UserError:
            return None
        if is_untrained:
            info = dataclasses.replace(info, iteration=-1)
        return info


@functools.lru_cache(maxsize=4)
def _parse_config(text: str) -> object:
    """Returns the nested dicts of a config in YAML, or None if the text is invalid."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return None


@dataclass
class WeightsFile:
    """The content of a weights file.

    Attributes:
        state: the tensors by name.
        rest: the other keys of a checkpoint, such as "optimizer" and "iteration".
        info: the metadata; None if the file has none.
    """

    state: dict[str, Tensor]
    rest: dict[str, Any] = field(default_factory=dict)
    info: WeightsInfo | None = None

    @property
    def evaluated(self) -> dict[str, Tensor]:
        """The moving average of the weights if the file has one, else ``state``."""
        average: Any = self.rest.get("ema")
        if _is_state(average):
            return dict(average)
        return self.state


def read_weights(path: str) -> tuple[dict[str, Tensor], WeightsInfo | None]:
    """Returns a file's tensors (their moving average if the file has one) and its metadata."""
    file = read_weights_file(path)
    return file.evaluated, file.info


def read_weights_file(path: str) -> WeightsFile:
    """Reads a file onto the CPU: ``.safetensors``, ``.pkl``, or PyTorch's with any other suffix.

    Raises a ``UserError`` if the file is missing or damaged, has no weights, or could run code.
    """
    path = check_weights_file(path)
    with refuse_unreadable(path):
        if _is_safetensors(path):
            file = _read_safetensors(path)
        elif _is_pickle(path):
            state, rest, known = read_detectron2_file(path)
            file = WeightsFile(state, rest, WeightsInfo(**known) if known else None)
        else:
            file = _read_pytorch(path)
    for name, tensor in file.state.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UserError(f"'{path}': '{name}' is not a plain dense tensor")
    return file


def local_weights(path: str) -> str:
    """Downloads the file at an address if necessary, and returns its local path.

    If ``path`` is not an address, returns it unchanged.
    """
    if "://" not in path:
        return path
    if path.startswith(_ZOO):
        # Without a suffix, the address of a zoo entry is a copy in Detectron2's format.
        path = f"{path}.safetensors"
    try:
        return str(PathManager.get_local_path(path))
    except UserError:
        raise
    except Exception as error:  # path handlers raise errors of many types
        raise UserError(
            f"'{path}' cannot be fetched: {describe_download_error(error)}; without a network, "
            "copy the file to this machine and name its path"
        ) from error


def find_weights(name: str | os.PathLike[str]) -> str:
    """Returns the path or address of weights, given a file, address, run folder or zoo entry.

    For a run folder, returns the weights that ``find_run_weights`` finds. Raises a ``UserError`` if
    the folder has no weights. Files and addresses are returned unchanged.
    """
    name = str(name)
    path = Path(name)
    is_address = "://" in name
    is_file = path.is_file() or path.suffix.lower() in _SUFFIXES
    if not name or is_address or is_file:
        return name
    if not path.is_dir():
        return f"{_ZOO}{name}"
    weights = find_run_weights(path)
    if weights is None:
        raise UserError(f"'{name}' is a folder without weights, such as model_final.safetensors")
    return str(weights)


def find_run_weights(folder: Path) -> Path | None:
    """Returns the weights that the folder of a run stands for; None if there are none.

    They are the best by validation, if the run has a validation set, or else the last ones.
    """
    for file_name in ("model.safetensors", BEST_WEIGHTS, LAST_WEIGHTS):
        if (folder / file_name).is_file():
            return folder / file_name
    checkpoints = sorted(folder.glob("model_*.pth"))  # in the order of iterations
    if checkpoints:
        return checkpoints[-1]
    return None


def save_weights(path: str, state_dict: Mapping[str, Tensor], info: WeightsInfo) -> None:
    """Writes weights and their metadata (as JSON) to a ``.safetensors`` file, atomically.

    Tensors may be on any device, and may share memory.
    """
    # Clones, because safetensors refuses tensors that share memory, such as tied weights.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state_dict.items()
    }
    metadata = {_METADATA_KEY: json.dumps(info.to_dict())}
    write_atomically(path, safetensors.torch.save(tensors, metadata))


def info_of(path: str) -> WeightsInfo | None:
    """Returns the metadata of a file; None if it has no metadata.

    The tensors are not read, except those of a ``.pkl`` file.
    """
    path = check_weights_file(path)
    if _is_safetensors(path):
        with _open_safetensors(path) as opened:
            return _parse_metadata(opened.metadata())
    if _is_pickle(path):
        return read_weights_file(path).info
    loaded = load_pytorch(path, mmap=True)
    if not isinstance(loaded, dict):
        return None
    return WeightsInfo.from_dict(loaded.get("info"))


def class_names_of(path: str) -> tuple[str, ...]:
    """Returns the class names in a file's metadata; empty if there are none."""
    info = info_of(path) or WeightsInfo()
    return info.class_names


def check_weights_file(weights: str) -> str:
    """Returns the local path of a weights file. Downloads the file if ``weights`` is an address.

    Raises a ``UserError`` if the path cannot be a file of weights.
    """
    path = Path(local_weights(weights))
    if path.is_dir():
        raise UserError(f"'{weights}' is a folder: name a file in it, such as model_final.pth")
    if not path.is_file():
        raise UserError(f"weights file '{weights}' does not exist")
    if not path.stat().st_size:
        raise UserError(f"weights file '{weights}' is empty: download or copy it again")
    return str(path)


def load_pytorch(path: str, *, mmap: bool = False) -> Any:
    """Calls ``torch.load`` with ``weights_only=True``, onto the CPU.

    With ``mmap``, the file is mapped to memory, and a tensor is read at its first use.

    Raises a ``UserError`` if the file is damaged, or contains objects that could run code.
    """
    try:
        # Files of PyTorch before 1.6 are not zip files and cannot be mapped.
        mmap = mmap and zipfile.is_zipfile(path)
        with warnings.catch_warnings():  # PyTorch asks users to report files that are refused here
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a broken zip file can raise anything
        if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
            if "numpy" in str(error):
                raise UserError(
                    f"'{path}' has NumPy arrays: save it with pickle.dump as a .pkl file instead, "
                    "or convert them with torch.from_numpy before torch.save"
                ) from error
            raise UserError(
                f"'{path}' is refused: it has objects other than tensors, which can run code; save "
                "only its state_dict() if you trust it"
            ) from error
        raise _unreadable(path, "PyTorch weights", type(error).__name__) from error


def _read_pytorch(path: str) -> WeightsFile:
    """Reads a checkpoint, which has tensors under one of ``_STATE_KEYS``, or a plain state dict."""
    loaded = load_pytorch(path)
    no_weights = UserError(f"'{path}' contains no weights: expected a dict of named tensors")
    if not isinstance(loaded, dict):
        raise no_weights
    for key in _STATE_KEYS:
        if _is_state(loaded.get(key)):
            rest = {name: value for name, value in loaded.items() if name != key}
            return WeightsFile(loaded[key], rest, WeightsInfo.from_dict(rest.get("info")))
    if not _is_state(loaded):
        raise no_weights
    return WeightsFile(loaded)


def _read_safetensors(path: str) -> WeightsFile:
    with _open_safetensors(path) as opened:
        info = _parse_metadata(opened.metadata())
    state = safetensors.torch.load_file(path)
    if not state:
        raise UserError(f"'{path}' contains no weights: it has no tensors")
    rest: dict[str, Any] = {}
    if info is not None:
        rest["info"] = info.to_dict()
    return WeightsFile(state, rest, info)


def _open_safetensors(path: str) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, "safetensors", str(error)) from error


def _unreadable(path: str, kind: str, reason: str) -> UserError:
    return UserError(
        f"'{path}' cannot be read as {kind}: it is truncated, or another kind of file ({reason})"
    )


def _parse_metadata(metadata: Mapping[str, str] | None) -> WeightsInfo | None:
    """Reads the metadata of a safetensors file; None if it has none, or if they are invalid."""
    if not metadata or _METADATA_KEY not in metadata:
        return None
    try:
        content = json.loads(metadata[_METADATA_KEY])
    except (ValueError, RecursionError):
        return None
    return WeightsInfo.from_dict(content)


def _is_state(value: object) -> bool:
    """Whether a value is a dict of named tensors that is not empty."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(name, str) and torch.is_tensor(item) for name, item in value.items())


def _is_safetensors(path: str) -> bool:
    return Path(path).suffix.lower() == ".safetensors"


def _is_pickle(path: str) -> bool:
    """Whether a file is a plain pickle; the files of ``torch.save`` are zip files with a pickle."""
    return Path(path).suffix.lower() in (".pkl", ".pickle") and not zipfile.is_zipfile(path)
