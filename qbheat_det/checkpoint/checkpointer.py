# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A Detectron2 checkpointer that writes files atomically and matches tensors strictly.

Files with pickled code are refused. Tensors that do not fit the model are an error unless
partial loading is requested.
"""

import os
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers, write_atomically
from qbheat_det.modeling.contracts import (
    get_pixel_statistics,
    get_timm_name,
    optional_modules,
    pretrain_only_modules,
)

from .matching import fit_weights
from .report import LoadReport, check_complete, check_exact
from .weights_file import (
    WeightsFile,
    WeightsInfo,
    check_weights_file,
    load_pytorch,
    read_weights_file,
)


class SafeCheckpointer(DetectionCheckpointer):
    """Saves checkpoints atomically, resumes from them, and starts new runs from other weights.

    After a file is loaded, ``report`` lists which tensors fit, and ``info`` is the file's metadata
    (None if it has none). Before that, both are None.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        class_names: Sequence[str] = (),
        allow_partial: bool = False,
        **checkpointables: Any,
    ) -> None:
        """
        Args:
            model: the model to load and save.
            save_dir: folder of the checkpoints.
            class_names: the model's classes, in contiguous order; empty if unknown.
            allow_partial: load the tensors that fit, even if some are missing or do not fit.
            checkpointables: objects with ``state_dict`` and ``load_state_dict``.
        """
        super().__init__(model, save_dir, **checkpointables)
        self.class_names = tuple(class_names)
        self.allow_partial = allow_partial
        self.report: LoadReport | None = None
        self.info: WeightsInfo | None = None
        if self.save_dir and self.save_to_disk:  # on the main process only
            remove_leftovers(self.save_dir)

    def save(self, name: str, **kwargs: Any) -> None:
        """Writes ``<name>.pth`` atomically, then writes the file's name to ``last_checkpoint``.

        The file has the model, the checkpointables and ``kwargs``.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        content = {"model": self.model.state_dict()}
        content.update({key: item.state_dict() for key, item in self.checkpointables.items()})
        content.update(kwargs)
        path = Path(self.save_dir) / f"{name}.pth"
        self.logger.info("Saving checkpoint to %s", path)
        remove_leftovers(self.save_dir)
        write_atomically(path, lambda stream: torch.save(content, stream))
        write_atomically(path.with_name("last_checkpoint"), path.name.encode())

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict[str, Any]:
        """Loads a file into the model; an empty path loads nothing.

        ``checkpointables`` are the names of the other objects to load, such as "trainer"; None
        loads all. Returns the other keys of the file, such as "iteration" and "info". If the file
        cannot be read or does not fit, raises a ``UserError`` and does not change the model.
        """
        return self._load_file_into_model(path, checkpointables, resuming=False)

    def resume(self, path: str) -> dict[str, Any]:
        """Loads the model and all checkpointables from a checkpoint of this run.

        Raises a ``UserError`` if the checkpoint and the model differ in classes or tensors.
        """
        return self._load_file_into_model(path, None, resuming=True)

    def has_checkpoint(self) -> bool:
        """Whether there is a ``last_checkpoint`` file or a complete checkpoint."""
        return super().has_checkpoint() or bool(self._find_newest_whole())

    def find_checkpoint_to_resume(self) -> str:
        """Returns the path of the last checkpoint.

        If that file is damaged, logs a warning and returns the newest complete checkpoint. Raises a
        ``UserError`` if the folder has no complete checkpoint.
        """
        last = self.get_checkpoint_file()
        if last and self._read_iteration(last) is not None:
            return last
        named = last or os.path.join(self.save_dir, "last_checkpoint")
        problem = f"'{named}' is missing or not whole"
        other = self._find_newest_whole()
        if not other:
            raise UserError(
                f"cannot resume: {problem}, and '{self.save_dir}' has no other whole checkpoint; a "
                "new run starts from weights with MODEL.WEIGHTS"
            )
        self.logger.warning("%s: resuming from the newest whole checkpoint, '%s'", problem, other)
        return other

    def get_checkpoint_file(self) -> str:
        """Returns the path of the file that ``last_checkpoint`` names, or ""."""
        try:
            named = (Path(self.save_dir) / "last_checkpoint").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        if not named:
            return ""
        return os.path.join(self.save_dir, os.path.basename(named))

    def _find_newest_whole(self) -> str:
        """Returns the complete checkpoint with the highest iteration, or ""."""
        if not self.save_dir:
            return ""
        iterations: dict[str, int] = {}
        for path in Path(self.save_dir).glob("*.pth"):
            iteration = self._read_iteration(str(path))
            if iteration is not None:
                iterations[str(path)] = iteration
        return max(iterations, key=lambda path: iterations[path], default="")

    def _read_iteration(self, path: str) -> int | None:
        """Returns the iteration of a checkpoint; None if it is incomplete or its checksums fail."""
        try:
            check_weights_file(path)
            content = load_pytorch(path, mmap=True)
        except UserError:
            return None
        is_run = isinstance(content, dict) and {"model", *self.checkpointables} <= content.keys()
        if not is_run or not isinstance(content.get("iteration"), int):
            return None
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            return None
        return int(content["iteration"])

    def _load_file_into_model(
        self, path: str, checkpointables: Collection[str] | None, *, resuming: bool
    ) -> dict[str, Any]:
        self.report = None
        self.info = None
        if not path:
            return {}
        file = read_weights_file(path)
        self._fill_model(path, file, resuming=resuming)
        rest = dict(file.rest)
        if checkpointables is None:
            checkpointables = self.checkpointables
        for key in checkpointables:
            if key in rest:
                self.checkpointables[key].load_state_dict(rest.pop(key))
        return rest

    def _fill_model(self, path: str, file: WeightsFile, *, resuming: bool) -> None:
        model = self.model
        info = file.info or WeightsInfo()
        model_state = model.state_dict()
        fitting, report = fit_weights(
            file.state if resuming else file.evaluated,
            model_state,
            file=path,
            old_classes=info.class_names,
            classes=self.class_names,
            optional_modules=optional_modules(model),
            skip=self._find_skipped(info),
            private=pretrain_only_modules(model),
        )
        if resuming:
            check_exact(report, "resume with the config of the run, or start a new one")
        else:
            self._check(report)
            self._check_timm_name(path, info)
        # Use the model's own module versions, because those of the file could convert tensors.
        # Backbones need all of their own tensors.
        state = OrderedDict({**model_state, **fitting})
        state._metadata = model_state._metadata  # type: ignore[attr-defined]
        model.load_state_dict(state, strict=False)
        self.report = report
        self.info = file.info
        self.logger.info("Loaded '%s': %s", path, report)
        errors = report.find_errors(new_parts=True)
        if self.allow_partial and errors:
            self.logger.warning("Loaded in part, as --allow-partial asks: %s", "; ".join(errors))
        self._warn_of_other_pixels(info)

    def _find_skipped(self, info: WeightsInfo) -> Sequence[str]:
        """Returns the child modules of a file that only its own pre-training objective loads."""
        trained = info.value_of("MODEL.META_ARCHITECTURE")
        if trained:
            is_same = trained == type(self.model).__name__
        else:
            is_same = info.pretrain_only_modules == pretrain_only_modules(self.model)
        return () if is_same else info.pretrain_only_modules

    def _check(self, report: LoadReport) -> None:
        check_complete(report, allow_partial=self.allow_partial)

    def _check_timm_name(self, path: str, info: WeightsInfo) -> None:
        """Refuses weights of a different timm network whose tensors have equal names and shapes.

        Such networks may differ in padding ("efficientnet_lite0" and "tf_efficientnet_lite0") or in
        ``eps``. The outputs would be wrong without an error.
        """
        name = get_timm_name(self.model)
        trained = info.timm_name
        if path.startswith("timm://"):
            trained = path.removeprefix("timm://").partition(".")[0]
        if not name or not trained or name == trained:
            return
        message = (
            f"'{path}' was trained in timm's {trained}; the tensors of {name} fit, but its "
            f"padding or eps may differ: build timm:{trained}"
        )
        if not self.allow_partial:
            raise UserError(f"{message} (--allow-partial loads it anyway)")
        self.logger.warning(message)

    def _warn_of_other_pixels(self, info: WeightsInfo) -> None:
        """Warns if the weights were trained with different pixel statistics."""
        stored = {"pixel_mean": info.pixel_mean, "pixel_std": info.pixel_std}
        for name, buffer in get_pixel_statistics(self.model).items():
            if not stored[name]:
                continue
            values = buffer.detach().cpu().double().flatten()
            expected = torch.tensor(stored[name], dtype=torch.float64)
            if values.shape != expected.shape or not torch.allclose(values, expected, rtol=1e-4):
                self.logger.warning(
                    "The weights were trained with %s %s in format %s, but the model has %s: check "
                    "INPUT.FORMAT, MODEL.PIXEL_MEAN and MODEL.PIXEL_STD",
                    name,
                    list(stored[name]),
                    info.pixel_format or "unknown",
                    values.tolist(),
                )


class ExactCheckpointer(SafeCheckpointer):
    """Loads trained models: file and model must have the same tensors and classes."""

    def _check(self, report: LoadReport) -> None:
        check_exact(report, "use the config.yaml that was written beside the weights")
