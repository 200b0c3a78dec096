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

from qbheat_det.config import Pixels, warn_of_other_pixels
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers, write_atomically
from qbheat_det.modeling.contracts import (
    get_pixel_format,
    get_pixel_statistics,
    get_timm_name,
    optional_modules,
    pretrain_only_modules,
)

from .detectron2_files import HEURISTICS, match_by_suffix
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
        is_quiet: bool = False,
        **checkpointables: Any,
    ) -> None:
        """
        Args:
            model: the model to load and save.
            save_dir: folder of the checkpoints.
            class_names: the model's classes, in contiguous order; empty if unknown.
            allow_partial: load the tensors that fit, even if some are missing or do not fit.
            is_quiet: do not log what is loaded.
            checkpointables: other objects to save and load, such as ``trainer``. Each has the
                methods ``state_dict`` and ``load_state_dict``.
        """
        super().__init__(model, save_dir, **checkpointables)
        self.class_names = tuple(class_names)
        self.allow_partial = allow_partial
        self.is_quiet = is_quiet
        self.report: LoadReport | None = None
        self.info: WeightsInfo | None = None
        if self.save_dir and self.save_to_disk:  # on the main process only
            remove_leftovers(self.save_dir)

    def save(self, name: str, **kwargs: Any) -> None:
        """Writes ``<name>.pth`` atomically, then writes the file's name to ``last_checkpoint``.

        The file is a dict of the model's state ("model"), the state of each checkpointable, and
        ``kwargs``. Only the main process writes.
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
        damaged = last or os.path.join(self.save_dir, "last_checkpoint")
        problem = f"'{damaged}' is missing or not whole"
        newest = self._find_newest_whole()
        if not newest:
            raise UserError(
                f"cannot resume: {problem}, and '{self.save_dir}' has no other whole checkpoint; a "
                "new run starts from weights with MODEL.WEIGHTS"
            )
        self.logger.warning("%s: resuming from the newest whole checkpoint, '%s'", problem, newest)
        return newest

    def get_checkpoint_file(self) -> str:
        """Returns the path of the checkpoint whose name is in ``last_checkpoint``.

        Returns "" if ``last_checkpoint`` is missing, unreadable or empty.
        """
        try:
            name = (Path(self.save_dir) / "last_checkpoint").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        if not name:
            return ""
        return os.path.join(self.save_dir, os.path.basename(name))

    def _find_newest_whole(self) -> str:
        """Returns the path of the complete checkpoint with the highest iteration, or ""."""
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
        if not isinstance(content, dict):
            return None
        has_all_keys = {"model", *self.checkpointables} <= content.keys()
        iteration = content.get("iteration")
        if not has_all_keys or not isinstance(iteration, int):
            return None
        # ``testzip`` returns the name of the first file whose checksum is wrong, or None.
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            return None
        return iteration

    def _load_file_into_model(
        self, path: str, checkpointables: Collection[str] | None, *, resuming: bool
    ) -> dict[str, Any]:
        """Loads the model and then the named checkpointables; None means all checkpointables.

        Returns the other keys of the file.
        """
        self.report = None
        self.info = None
        if not path:
            return {}
        file = read_weights_file(path)
        self._fill_model(path, file, resuming=resuming)
        if checkpointables is None:
            checkpointables = self.checkpointables
        for key in checkpointables:
            if key in file.rest:
                self.checkpointables[key].load_state_dict(file.rest[key])
        return {key: value for key, value in file.rest.items() if key not in checkpointables}

    def _fill_model(self, path: str, file: WeightsFile, *, resuming: bool) -> None:
        """Checks that the tensors of a file fit, and copies them into the model."""
        model = self.model
        info = file.info or WeightsInfo()
        model_state = model.state_dict()
        stored = file.state if resuming else file.evaluated
        if HEURISTICS in file.rest:
            stored = match_by_suffix(stored, model_state, file=path)
        fitting, report = fit_weights(
            stored,
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
        # Tensors that the file lacks keep the model's values, since some modules refuse a state
        # without all of their tensors. ``_metadata`` has versions of modules. Those of the model
        # are used, because PyTorch's modules convert the tensors of older versions.
        state = OrderedDict({**model_state, **fitting})
        state._metadata = model_state._metadata  # type: ignore[attr-defined]
        model.load_state_dict(state, strict=False)
        self.report = report
        self.info = file.info
        if self.is_quiet:
            return
        self.logger.info("Loaded '%s': %s", path, report)
        errors = report.find_errors(new_parts=True)
        if self.allow_partial and errors:
            self.logger.warning("Loaded in part, as --allow-partial asks: %s", "; ".join(errors))
        warn_of_other_pixels(
            Pixels(info.pixel_format, info.pixel_mean, info.pixel_std), read_pixels(model)
        )

    def _find_skipped(self, info: WeightsInfo) -> Sequence[str]:
        """Returns the names of child modules whose tensors in the file are not loaded.

        They are the parts for pre-training only, such as a decoder. If the model has the
        architecture that was pre-trained, they are loaded too, and the result is empty.
        """
        trained_architecture = info.value_of("MODEL.META_ARCHITECTURE")
        if trained_architecture:
            is_same = trained_architecture == type(self.model).__name__
        else:
            is_same = info.pretrain_only_modules == pretrain_only_modules(self.model)
        if is_same:
            return ()
        return info.pretrain_only_modules

    def _check(self, report: LoadReport) -> None:
        """Raises a ``UserError`` if the tensors of a file do not fit well enough."""
        check_complete(report, allow_partial=self.allow_partial)

    def _check_timm_name(self, path: str, info: WeightsInfo) -> None:
        """Refuses weights of a different timm network whose tensors have equal names and shapes.

        Such networks may differ in padding ("efficientnet_lite0" and "tf_efficientnet_lite0") or in
        ``eps``. The outputs would be wrong without an error.
        """
        model_name = get_timm_name(self.model)
        if path.startswith("timm://"):  # such as "timm://resnet18.a1_in1k"
            trained_name = path.removeprefix("timm://").partition(".")[0]
        else:
            trained_name = info.timm_name
        if not model_name or not trained_name or model_name == trained_name:
            return
        message = (
            f"'{path}' was trained in timm's {trained_name}; the tensors of {model_name} fit, but "
            f"its padding or eps may differ: build timm:{trained_name}"
        )
        if not self.allow_partial:
            raise UserError(f"{message} (--allow-partial loads it anyway)")
        self.logger.warning(message)


class ExactCheckpointer(SafeCheckpointer):
    """Loads trained models: file and model must have the same tensors and classes."""

    def _check(self, report: LoadReport) -> None:
        check_exact(report, "use the config.yaml that was written beside the weights")


def read_pixels(model: nn.Module) -> Pixels:
    """Returns the pixels of a model's images, as far as the model knows them."""
    values = {}
    for name, buffer in get_pixel_statistics(model).items():
        values[name.removeprefix("pixel_")] = tuple(buffer.detach().double().flatten().tolist())
    return Pixels(format=get_pixel_format(model), **values)
