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
        error = f"'{last or Path(self.save_dir) / 'last_checkpoint'}' is missing or not whole"
        other = self._find_newest_whole()
        if not other:
            raise UserError(
                f"cannot resume: {error}, and '{self.save_dir}' has no other whole checkpoint; a "
                "new run starts from weights with MODEL.WEIGHTS"
            )
        self.logger.warning("%s: resuming from the newest whole checkpoint, '%s'", error, other)
        return other

    def get_checkpoint_file(self) -> str:
        """Returns the path of the file that ``last_checkpoint`` names, or ""."""
        try:
            named = (Path(self.save_dir) / "last_checkpoint").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        return os.path.join(self.save_dir, os.path.basename(named)) if named else ""

    def _find_newest_whole(self) -> str:
        """Returns the complete checkpoint with the highest iteration, or ""."""
        files = Path(self.save_dir).glob("*.pth") if self.save_dir else ()
        found = {str(path): self._read_iteration(str(path)) for path in files}
        whole = {path: iteration for path, iteration in found.items() if iteration is not None}
        return max(whole, key=lambda path: whole[path], default="")

    def _read_iteration(self, path: str) -> int | None:
        """Returns the iteration of a checkpoint; None if it is incomplete or its checksums fail."""
        try:
            check_weights_file(path)
            content = load_pytorch(path, mmap=True)
        except UserError:
            return None
        is_run = isinstance(content, dict) and {"model", *self.checkpointables} <= content.keys()
        if not is_run or (zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip()):
            return None
        iteration = content.get("iteration")
        return iteration if isinstance(iteration, int) else None

    def _load_file_into_model(
        self, path: str, checkpointables: Collection[str] | None, *, resuming: bool
    ) -> dict[str, Any]:
        self.report = self.info = None
        if not path:
            return {}
        file = read_weights_file(path)
        self._fill_model(path, file, resuming=resuming)
        rest = dict(file.rest)
        for key in self.checkpointables if checkpointables is None else checkpointables:
            if key in rest:
                self.checkpointables[key].load_state_dict(rest.pop(key))
        return rest

    def _fill_model(self, path: str, file: WeightsFile, *, resuming: bool) -> None:
        model, info = self.model, file.info
        stored, own_state = file.state if resuming else file.evaluated, model.state_dict()
        # Only a model of the same objective loads the children that pre-training needs.
        own_parts = pretrain_only_modules(model)
        skip = [*info.pretrain_only_modules] if info else []
        if info:
            trained = info.value_of("MODEL.META_ARCHITECTURE")
            is_same = trained == type(model).__name__ if trained else tuple(skip) == own_parts
            skip = [] if is_same else skip
        fitting, report = fit_weights(
            stored,
            own_state,
            file=path,
            old_classes=info.class_names if info else (),
            classes=self.class_names,
            optional_modules=optional_modules(model),
            skip=skip,
            private=own_parts,
        )
        if resuming:
            check_exact(report, "resume with the config of the run, or start a new one")
        else:
            self._check(report)
            self._check_network(path, info)
        # Use the model's own module versions, because those of the file could convert tensors.
        # Backbones need all of their own tensors.
        state = OrderedDict({**own_state, **fitting})
        state._metadata = own_state._metadata  # type: ignore[attr-defined]
        model.load_state_dict(state, strict=False)
        self.report, self.info = report, info
        self.logger.info("Loaded '%s': %s", path, report)
        if self.allow_partial and (errors := report.find_errors(new_parts=True)):
            self.logger.warning("Loaded in part, as --allow-partial asks: %s", "; ".join(errors))
        if info is not None:
            self._warn_of_other_pixels(info)

    def _check(self, report: LoadReport) -> None:
        check_complete(report, allow_partial=self.allow_partial)

    def _check_network(self, path: str, info: WeightsInfo | None) -> None:
        """Refuses weights of a different timm network whose tensors have equal names and shapes.

        Such networks may differ in padding ("efficientnet_lite0" and "tf_efficientnet_lite0") or in
        ``eps``. The outputs would be wrong without an error.
        """
        own = get_timm_name(self.model)
        trained = path.removeprefix("timm://").partition(".")[0] if "timm://" in path else ""
        trained = trained or (info.timm_name if info else "")
        if not (own and trained) or own == trained:
            return
        message = (
            f"'{path}' was trained in timm's {trained}; the tensors of {own} fit, but its "
            f"padding or eps may differ: build timm:{trained}"
        )
        if not self.allow_partial:
            raise UserError(f"{message} (--allow-partial loads it anyway)")
        self.logger.warning(message)

    def _warn_of_other_pixels(self, info: WeightsInfo) -> None:
        """Warns if the weights were trained with different pixel statistics."""
        stored = {"pixel_mean": info.pixel_mean, "pixel_std": info.pixel_std}
        for name, now in get_pixel_statistics(self.model).items():
            values = now.detach().cpu().double().flatten()
            expected = torch.tensor(stored[name], dtype=torch.float64)
            if not stored[name] or (
                values.shape == expected.shape and torch.allclose(values, expected, rtol=1e-4)
            ):
                continue
            self.logger.warning(
                "The weights were trained with %s %s in format %s, but the model has %s: check "
                "INPUT.FORMAT, MODEL.PIXEL_MEAN and MODEL.PIXEL_STD",
                *(name, list(stored[name]), info.pixel_format or "unknown", values.tolist()),
            )


class ExactCheckpointer(SafeCheckpointer):
    """Loads trained models: file and model must have the same tensors and classes."""

    def _check(self, report: LoadReport) -> None:
        check_exact(report, "use the config.yaml that was written beside the weights")
