# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a compiled program depends on: weights, settings, code, libraries and the processor."""

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .precision import processor_name

_FORMAT = 3  # of the entries, counted up when they change their meaning
_OWN = ("layers", "modeling", "deployment")


def describe(module: nn.Module, **settings: Any) -> dict[str, str]:
    """Returns what a program made of a module depends on, a digest or a few words each.

    Args:
        module: whose weights become part of the program.
        settings: what else it depends on.
    """
    device = next(iter(module.state_dict().values())).device
    return {
        "format": str(_FORMAT),
        "weights": _weights(module),
        "structure": _sha256([repr(module), *_plain_attributes(module)]),
        "code": _code({type(part).__module__ for part in module.modules()}),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": sys.version.split()[0],
        "device": _device_name(device),
        "settings": repr(sorted(settings.items())),
    }


def key_of(description: dict[str, str]) -> str:
    """Returns the name of an entry, hexadecimal."""
    return _sha256(f"{name}={value}" for name, value in sorted(description.items()))[:32]


def _weights(module: nn.Module) -> str:
    digest = hashlib.sha256()
    named = [*module.named_parameters(), *module.named_buffers()]  # the unsaved ones, too
    for name, value in sorted(named, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def _plain_attributes(module: nn.Module) -> Iterable[str]:
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if not key.startswith(("_forward", "_backward", "_state", "_load")):
                word = _word(value)
                if word is not None:
                    yield f"{name}.{key}={word}"


def _word(value: object) -> str | None:
    """Says what a value is, in each process the same; None for what has no such word."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, functools.partial):
        value = (value.func, value.args, value.keywords)
    if isinstance(value, tuple | list | set | frozenset | dict):
        items = value.items() if isinstance(value, dict) else value
        words = [word for item in items if (word := _word(item)) is not None]
        if len(words) < len(value):
            return None
        return f"[{', '.join(sorted(words) if isinstance(value, set | frozenset) else words)}]"
    if callable(value):  # an activation, as Detectron2's convolutions have it, which no repr shows
        named: Any = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return None


def _code(modules: set[str]) -> str:
    """A digest of the files that define the classes, and of all of ours that they may call."""
    root = Path(__file__).resolve().parents[1]
    files = {path for folder in _OWN for path in (root / folder).rglob("*.py")}
    for name in modules:
        if name.partition(".")[0] != "torch":  # its version says it
            path = getattr(sys.modules.get(name), "__file__", None)
            files.add(Path(path)) if path else None
    layers = importlib.import_module("detectron2.layers").__file__
    files |= set(Path(str(layers)).parent.glob("*.py"))
    # By content alone: the same files elsewhere are the same code.
    return _sha256(sorted(_digest_of_file(path, path.stat().st_mtime_ns) for path in files))


@functools.cache
def _digest_of_file(path: Path, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    return f"{device.type} {processor_name()} {os.cpu_count()}"


def _sha256(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
