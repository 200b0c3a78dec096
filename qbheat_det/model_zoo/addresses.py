# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The model zoo's weights by address: ``MODEL.WEIGHTS: "qbheat://retinanet/285M_aquarium"``.

Importing this module, which importing the package does, makes Detectron2's path manager understand
such addresses, so that they work wherever Detectron2 takes weights: in every config, in its own
``DefaultPredictor`` and ``DefaultTrainer``, in LazyConfigs. Detectron2's checkpointer cannot read
``.safetensors`` in its releases so far, therefore the address leads to the same tensors in
PyTorch's format, made once in the cache: floating numbers in float32, as models are trained in,
since half precision is how the files travel. What stands there is not believed: once in every
process it is compared with what the file of the index gives, and made anew where it differs.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from qbheat_det.checkpoint import read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .index import PREFIX, ZooEntry, find_entry
from .places import cache_folder, check_own_cache, fetch


class ZooWeights(PathHandler):
    """From ``qbheat://<name>`` to a ``.pth`` of plain tensors on this machine."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        return str(get_pytorch_file(find_entry(path), anew=force))

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> Any:
        if set(mode) - set("rbt"):
            raise UserError(f"'{path}' can only be read")
        return open(self._get_local_path(path), mode, buffering)

    def _exists(self, path: str, **kwargs: Any) -> bool:
        try:
            find_entry(path)
        except UserError:
            return False
        return True

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return self._exists(path)


def get_pytorch_file(entry: ZooEntry, *, anew: bool = False) -> Path:
    """Returns an entry's weights as ``.pth``, which Detectron2's own checkpointer reads too.

    Args:
        entry: of the index.
        anew: whether to make the file again if it is there.

    Raises:
        UserError: the weights cannot be fetched, or the file cannot be written.
    """
    source = fetch(entry)  # its hash is that of the index, each time
    target = cache_folder(entry) / Path(entry.file).with_suffix(".pth")
    if anew or _stamp(target) is None or _proved.get(target) != _stamp(target):
        check_own_cache(target)
        content = _to_pytorch(source)
        if anew or not target.is_file() or target.read_bytes() != content:
            write_atomically(target, lambda stream: stream.write(content))
        _proved[target] = _stamp(target)
    return target


# Of the files that this process has compared.
_proved: dict[Path, tuple[int, ...] | None] = {}


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when a file does; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _to_pytorch(source: Path) -> bytes:
    state, info = read_weights(str(source))
    content: dict[str, Any] = {
        "model": {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }
    }
    if info is not None:
        content["info"] = info.to_dict()
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


PathManager.register_handler(ZooWeights())
