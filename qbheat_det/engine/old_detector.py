# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The old detector of ``--keep-classes``: the one in ``MODEL.WEIGHTS``, which stays as it is.

``find_kept_classes`` checks the flag, and returns the classes to keep. In training, ``OldDetector``
predicts on the labelled images of each step. The model learns these predictions for the old classes
that are not annotated in an image.
"""

import copy
from collections.abc import Sequence

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, check_weights_file, info_of
from qbheat_det.config import NETWORK_KEYS, get_value
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_file
from qbheat_det.core.text import join_first
from qbheat_det.modeling.contracts import OLD_PREDICTIONS, BatchedInputs, SupportsKeptClasses

from .run_flags import RunFlags


def find_kept_classes(flags: RunFlags, cfg: CfgNode) -> tuple[str, ...]:
    """Returns the classes of the weights that ``--keep-classes`` keeps; empty without the flag.

    Raises:
        UserError: there are no weights of a detector with named classes, or the config builds
            another network, or one that cannot keep classes.
    """
    if "MODEL.KEEP_CLASSES.NUM" in flags.overrides:
        raise UserError("MODEL.KEEP_CLASSES.NUM follows from --keep-classes: leave it out")
    if not flags.keep_classes:
        return ()
    if flags.eval_only:
        raise UserError("--keep-classes trains: leave out --eval-only")
    weights = flags.overrides.get("MODEL.WEIGHTS", "")
    if not weights:
        raise UserError("--keep-classes needs --weights RUN, the detector whose classes are kept")
    info = info_of(weights)
    if info is None or not info.class_names:
        raise UserError(
            f"--keep-classes: '{weights}' names no classes; it must be a detector that this "
            "package has trained"
        )
    twice = sorted({name for name in info.class_names if info.class_names.count(name) > 1})
    if twice:
        raise UserError(f"--keep-classes: '{weights}' has two classes '{twice[0]}'")
    _check_network(weights, info, cfg)
    architecture = cfg.MODEL.META_ARCHITECTURE
    if not issubclass(META_ARCH_REGISTRY.get(architecture), SupportsKeptClasses):
        raise UserError(
            f"--keep-classes: {architecture} cannot keep classes; RetinaNet, FCOS and MF-DETR can. "
            "Label the old classes in the new images instead"
        )
    return info.class_names


def _check_network(weights: str, info: WeightsInfo, cfg: CfgNode) -> None:
    """Checks that the config builds the network of the weights."""
    for key in NETWORK_KEYS:
        of_weights = info.value_of(key)
        of_config = get_value(cfg, key)
        if of_weights is not None and of_weights != of_config:
            raise UserError(
                f"--keep-classes: '{weights}' has {key} {of_weights}, but the config has "
                f"{of_config}: leave out --config-file and --size, or name a config of the same "
                "network"
            )


def check_new_classes(kept: Sequence[str], of_data: Sequence[str]) -> None:
    """Checks that ``--keep-classes`` has something to do.

    Data without a new class are allowed if they lack some of the kept classes: these would be
    forgotten.

    Raises:
        UserError: the data have exactly the kept classes.
    """
    if set(kept) == set(of_data):
        raise UserError(
            f"--keep-classes: the data have all classes of the weights ({join_first(kept)}), and "
            "no new one: leave it out"
        )


class OldDetector:
    """Adds its predictions, with key ``OLD_PREDICTIONS``, to the dicts of labelled images.

    Attributes:
        digest: hash of the file of weights; "" before ``load``.
    """

    def __init__(self, model: nn.Module, *, precision: torch.dtype | None) -> None:
        """
        Args:
            model: the model to train, of which the old detector is a copy with other weights.
            precision: dtype of autocast; None disables autocast.
        """
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._precision = precision
        self.digest = ""

    def load(self, weights: str, class_names: Sequence[str]) -> None:
        """Loads the old detector from ``weights``. ``class_names`` are those of the model."""
        # The start of a run has logged the same for the model itself.
        checkpointer = SafeCheckpointer(self._model, class_names=class_names, is_quiet=True)
        checkpointer.load(weights, checkpointables=[])
        self.digest = hash_file(check_weights_file(weights))

    def load_again(self, weights: str, class_names: Sequence[str]) -> None:
        """Loads the old detector of a resumed run, whose ``digest`` is that of its checkpoint.

        Raises:
            UserError: the file of weights is another than at the start of the run.
        """
        before = self.digest
        self.load(weights, class_names)
        if self.digest != before:
            raise UserError(
                f"--resume continues a run that keeps the classes of '{weights}', but this file "
                "has changed since its start: restore it, or start a new run"
            )

    def __call__(self, batches: Sequence[BatchedInputs]) -> None:
        """Adds predictions to the labelled images in the micro-batches of a step."""
        assert isinstance(self._model, SupportsKeptClasses)
        device = next(self._model.parameters()).device.type
        for batch in batches:
            with torch.autocast(device, dtype=self._precision, enabled=self._precision is not None):
                predictions = self._model.predict_old(batch)
            for image, prediction in zip(batch, predictions, strict=True):
                image[OLD_PREDICTIONS] = prediction


def build_old_detector(
    cfg: CfgNode, model: nn.Module, *, precision: torch.dtype | None
) -> OldDetector | None:
    """Returns the old detector of a run, without its weights; None if no classes are kept.

    The arguments after the config are those of ``OldDetector``.
    """
    if not cfg.MODEL.KEEP_CLASSES.NUM:
        return None
    return OldDetector(model, precision=precision)
