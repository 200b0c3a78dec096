# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's checkpointer, reading tensors only.

Detectron2 unpickles ``.pkl`` files, and a pickle can run code; here they are refused. Everything
else, from heuristic name matching to saving, is Detectron2's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer

from qbheat_det.errors import UserError


class SafeCheckpointer(DetectionCheckpointer):
    """Reads PyTorch files of named tensors; reports what does not fit, as Detectron2 does."""

    def load(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a file into the model; an empty path leaves the model as it is.

        Raises:
            UserError: the file does not exist, is a pickle, or holds no weights.
        """
        if path:
            check_weights_file(path)
        return super().load(path, *args, **kwargs)

    def _load_file(self, filename: str) -> dict[str, Any]:
        try:
            loaded = torch.load(filename, map_location="cpu", weights_only=True)
        except Exception as error:  # a broken file can raise anything on its way through zip
            raise UserError(
                f"'{filename}' cannot be read as PyTorch weights; it may be truncated, or not be "
                f"a weights file at all ({type(error).__name__})"
            ) from error
        state = loaded.get("model", loaded) if isinstance(loaded, dict) else None
        tensors = isinstance(state, dict) and all(torch.is_tensor(v) for v in state.values())
        if not tensors or not state:
            raise UserError(f"'{filename}' holds no weights: a dict of named tensors is expected")
        self._filename = filename
        return {**loaded, "model": state} if state is not loaded else {"model": state}


class ExactCheckpointer(SafeCheckpointer):
    """For trained models: every tensor of the file and of the model must find its partner."""

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        """
        Raises:
            UserError: the weights do not fit the model.
        """
        wrong = {key: f"{key} {old} instead of {new}" for key, old, new in _shapes(incompatible)}
        missing = [key for key in incompatible.missing_keys if key not in wrong]
        faults = [
            _count(missing, "missing"),
            _count(incompatible.unexpected_keys, "unexpected"),
            _count(list(wrong.values()), "of another shape"),
        ]
        if any(faults):
            raise UserError(
                f"'{self._filename}' does not fit the model of the config: "
                f"{'; '.join(filter(None, faults))}; use the config.yaml that was written beside "
                "the weights"
            )


def check_weights_file(weights: str) -> None:
    """Checks, without reading it, that a path can be weights.

    Raises:
        UserError: it does not exist, is a folder, or is a pickle.
    """
    path = Path(weights)
    if path.suffix.lower() in {".pkl", ".pickle"}:
        raise UserError(
            f"'{weights}' is refused: unpickling a file can run code hidden in it; convert it to "
            ".pth where you trust it, with torch.save({'model': …})"
        )
    if "://" in weights:  # fetched by Detectron2's path manager
        return
    if path.is_dir():
        raise UserError(f"'{weights}' is a folder: name the weights in it, such as model_final.pth")
    if not path.is_file():
        raise UserError(f"weights file '{weights}' does not exist")


def _shapes(incompatible: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(key, tuple(old), tuple(new)) for key, old, new in incompatible.incorrect_shapes]


def _count(names: Sequence[str], what: str) -> str:
    first = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what} ({first})" if names else ""
