# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's checkpointer, reading tensors only and writing files that are whole or not there.

Detectron2 unpickles ``.pkl`` files, and a pickle can run code; here they are refused. Detectron2
logs what does not fit and goes on; here it is an error unless asked for.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers, write_atomically
from qbheat_det.modeling.contracts import (
    equivalent_configs,
    get_pixel_statistics,
    pretrain_only_modules,
)

from .fitting import (
    find_left_behind,
    find_training_only,
    find_unbuilt,
    fit_weights,
    without_children,
)
from .load_report import LoadReport
from .resumable import find_fault, newest_whole
from .weights_file import (
    WeightsFile,
    check_weights_file,
    class_names_beside,
    local_weights,
    read_weights_file,
)
from .weights_info import WeightsInfo


class SafeCheckpointer(DetectionCheckpointer):
    """Saves whole checkpoints, resumes from them, and starts new runs from others' weights.

    After ``load``, ``report`` says what became of each tensor, and ``info`` what the file says of
    itself; both None where nothing was loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        class_names: Sequence[str] = (),
        allow_partial: bool = False,
        save_to_disk: bool | None = None,
        **checkpointables: Any,
    ) -> None:
        """
        Args:
            model: to load into and to save.
            save_dir: folder of the checkpoints.
            class_names: the model's classes, contiguous order; empty if unknown.
            allow_partial: load what fits, even where a file promises more.
            save_to_disk: None saves on the main process alone.
            checkpointables: objects with ``state_dict`` and ``load_state_dict``.
        """
        super().__init__(model, save_dir, save_to_disk=save_to_disk, **checkpointables)
        self.class_names = tuple(class_names)
        self.allow_partial = allow_partial
        self.report: LoadReport | None = None
        self.info: WeightsInfo | None = None
        self._resuming = False
        self._file = WeightsFile({})
        self._filename = ""
        if self.save_dir and self.save_to_disk:
            remove_leftovers(self.save_dir)

    def save(self, name: str, **kwargs: Any) -> None:
        """Writes ``name``.pth, then names it in ``last_checkpoint``; does so whole or not at all.

        Args:
            name: file name without its ending.
            kwargs: more to save, made of tensors, numbers, strings, lists and dicts.

        Raises:
            UserError: the file cannot be written; earlier checkpoints are untouched.
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
        self.tag_last_checkpoint(path.name)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Names the file that ``resume_or_load`` goes on from."""
        tag = Path(self.save_dir) / "last_checkpoint"
        write_atomically(tag, lambda stream: stream.write(last_filename_basename.encode()))

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict[str, Any]:
        """Loads a file into the model; an empty path leaves the model as it is.

        Args:
            path: ``.safetensors`` or PyTorch's format, here or behind an address.
            checkpointables: names of those to load besides the model; all if None.

        Returns:
            What else the file holds, such as "iteration" and "info".

        Raises:
            UserError: the file cannot be read, or holds less than it promises; the model is as
                it was before.
        """
        self.report = self.info = None
        if path:
            check_weights_file(path)
            path = local_weights(path)
        # fvcore's own: Detectron2's reads options for its heuristic from behind a "?" in the path,
        # and its main trips over them in the next load where one has failed.
        return dict(super(DetectionCheckpointer, self).load(path, checkpointables))

    def has_checkpoint(self) -> bool:
        """Whether there is a tag to resume from, or a checkpoint that a kill left without one."""
        return super().has_checkpoint() or bool(self._newest_whole())

    def get_all_checkpoint_files(self) -> list[str]:
        """Returns the paths of all ``.pth`` files in the folder."""
        return list(super().get_all_checkpoint_files()) if os.path.isdir(self.save_dir) else []

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Goes on from the last checkpoint if ``resume`` and there is one; else loads ``path``.

        Where the last one is missing or damaged, the newest whole one takes its place, and the
        log says so.

        Returns:
            As ``load``.

        Raises:
            UserError: as ``load``; or there are checkpoints to resume from, but none is whole.
        """
        if not (resume and self.has_checkpoint()):
            return self.load(path, checkpointables=[])
        return self.resume(self.find_checkpoint_to_resume())

    def resume(self, path: str) -> dict[str, Any]:
        """Loads a checkpoint with all that the run keeps; see ``find_checkpoint_to_resume``.

        Returns:
            As ``load``.

        Raises:
            UserError: as ``load``, or the model of the file is another one.
        """
        self._resuming = True
        try:
            return self.load(path)
        finally:
            self._resuming = False

    def find_checkpoint_to_resume(self) -> str:
        """Returns the path of the last checkpoint, or else of the newest whole one.

        Raises:
            UserError: none is whole.
        """
        last = self.get_checkpoint_file()
        fault = find_fault(last) if last else f"'{self.save_dir}' has no file 'last_checkpoint'"
        if not fault:
            return last
        other = self._newest_whole()
        if not other:
            raise UserError(
                f"cannot resume: {fault}, and '{self.save_dir}' has no other whole checkpoint; "
                "start anew in another OUTPUT_DIR, or move this one away"
            )
        self.logger.warning("%s: resuming from the newest whole checkpoint, '%s'", fault, other)
        return other

    def get_checkpoint_file(self) -> str:
        """Returns the path that ``last_checkpoint`` names; empty if it does not name one."""
        try:
            named = (Path(self.save_dir) / "last_checkpoint").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        return os.path.join(self.save_dir, os.path.basename(named)) if named else ""

    def _newest_whole(self) -> str:
        return newest_whole(self.get_all_checkpoint_files(), needs=tuple(self.checkpointables))

    def _load_file(self, filename: str) -> dict[str, Any]:
        self._filename, self._file = filename, read_weights_file(filename)
        lacks = [key for key in self.checkpointables if key not in self._file.rest]
        if self._resuming and lacks:
            raise UserError(
                f"cannot resume from '{filename}': it holds no {' and no '.join(lacks)}, so it is "
                "no checkpoint of this run; start a new run from its weights with MODEL.WEIGHTS"
            )
        state = self._file.state if self._resuming else self._file.evaluated
        return {**self._file.rest, "model": state}

    def _load_model(self, checkpoint: dict[str, Any]) -> None:
        own_state = self.model.state_dict()
        info = self._file.info
        stored = checkpoint.pop("model")
        skipped = self._find_skipped(stored)
        fitting, report = fit_weights(
            stored,
            without_children(own_state, skipped),
            file=self._filename,
            old_classes=info.class_names if info else class_names_beside(self._filename),
            classes=self.class_names,
            unbuilt=find_unbuilt(self.model),
            left_behind=[
                *find_left_behind(self.model, info.left_behind if info else ()),
                *skipped,
            ],
            private=pretrain_only_modules(self.model),
        )
        self._file = WeightsFile({})
        self._check(report)
        # The tensors stand for the model's own modules now, whatever modules saved them: a
        # version that another class wrote must not start a conversion.
        state = OrderedDict(fitting)
        state._metadata = own_state._metadata  # type: ignore[attr-defined]
        self.model.load_state_dict(state, strict=False)
        self.report, self.info = report, info
        self.logger.info("Loaded '%s': %s", self._filename, report)
        if self.allow_partial and (faults := report.find_faults(new_parts=True)):
            self.logger.warning("Loaded in part, as --allow-partial asks: %s", "; ".join(faults))
        self._compare_pixels()
        self._compare_scores()

    def _find_skipped(self, stored: Mapping[str, Tensor]) -> Sequence[str]:
        # A new run starts its training-only parts anew, from a checkpoint as from an export.
        return () if self._resuming else find_training_only(self.model, stored, keep_equal=False)

    def _check(self, report: LoadReport) -> None:
        if self._resuming:
            check_exact(
                report, "resume with the config of the run, or start anew from MODEL.WEIGHTS"
            )
            return
        check_promise(report, allow_partial=self.allow_partial)

    def _compare_pixels(self) -> None:
        """Warns where the model sees other pixel values than the weights were trained on."""
        for name, now in get_pixel_statistics(self.model).items():
            trained = getattr(self.info, name, ())
            if not trained:
                continue
            values = now.detach().cpu().double().flatten()
            expected = torch.tensor(trained, dtype=torch.float64)
            if values.shape != expected.shape or not torch.allclose(values, expected, rtol=1e-4):
                self.logger.warning(
                    "'%s' was trained with %s %s in format %s, but the model has %s: set "
                    "INPUT.FORMAT, MODEL.PIXEL_MEAN and MODEL.PIXEL_STD to those of the weights",
                    self._filename,
                    name,
                    list(trained),
                    getattr(self.info, "pixel_format", "") or "unknown",
                    values.tolist(),
                )

    def _compare_scores(self) -> None:
        """Warns where outputs become scores otherwise than the weights were trained for."""
        name = type(self.model).__name__
        if self.info is None or self.info.value_of("MODEL.META_ARCHITECTURE") != name:
            return
        for key, alike in equivalent_configs(self.model).items():
            trained = self.info.value_of(key)
            if trained is not None and trained not in alike:
                self.logger.warning(
                    "'%s' was trained with %s %s, but this model's scores are those of %s: they "
                    "mean nothing until it is trained so; to evaluate, set the key to the former",
                    self._filename,
                    key,
                    trained,
                    " and ".join(alike),
                )


class ExactCheckpointer(SafeCheckpointer):
    """For trained models: every tensor of the file and of the model must find its partner.

    The classes too: weights of other names, or of another order, are refused. What serves training
    alone may be missing, or be another.
    """

    def _find_skipped(self, stored: Mapping[str, Tensor]) -> Sequence[str]:
        return find_training_only(self.model, stored, keep_equal=True)

    def _check(self, report: LoadReport) -> None:
        check_exact(report, "use the config.yaml that was written beside the weights")


def check_promise(report: LoadReport, *, allow_partial: bool) -> None:
    """
    Raises:
        UserError: part of the file has no place, or part of the model is filled in part; with
            ``allow_partial``, only where the file is of another architecture.
    """
    faults = report.find_faults(new_parts=True)
    if report.is_of_another_architecture:
        raise UserError(
            f"'{report.file}' is of another architecture: {report.num_placed} of its "
            f"{report.num_stored} tensors fit the model ({'; '.join(faults)}); use the config that "
            "belongs to these weights"
        )
    if faults and not allow_partial:
        note = f"; {report.note}" if report.note else ""
        raise UserError(
            f"'{report.file}' does not fill what it promises: {'; '.join(faults)}{note}; use the "
            "config that belongs to these weights, or load what fits with --allow-partial"
        )


def check_exact(report: LoadReport, way_out: str) -> None:
    """
    Raises:
        UserError: the file does not fill the whole model, or is of other classes.
    """
    change = report.class_change
    if change is not None:
        raise UserError(
            f"'{report.file}' was trained on the classes {list(change.old)}, but the model's are "
            f"{list(change.now)}: another name or order is another meaning of the same score; "
            f"{way_out}"
        )
    faults = report.find_faults(new_parts=False)
    if faults:
        raise UserError(
            f"'{report.file}' does not fit the model of the config: {'; '.join(faults)}; {way_out}"
        )
