# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MODEL.DEPLOY.ENABLED`` for those who build a model by Detectron2's own means.

``DefaultPredictor`` builds, loads weights and predicts; nothing of ours is called in between. So a
model that was built with the key deploys a copy of itself when it first predicts.
"""

import copy
import functools
import logging
from typing import Any, TypeVar

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from .deploy import deploy
from .settings import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=type[nn.Module])


def honours_deploy_key(cls: T) -> T:
    """Decorates a meta-architecture, registered or not: with the key it predicts deployed."""
    init = cls.__init__

    @functools.wraps(init)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        cfg = args[0] if args else kwargs.get("cfg")
        if isinstance(cfg, CfgNode) and cfg.get("MODEL", {}).get("DEPLOY", {}).get("ENABLED"):
            self.forward = FastForward(self, cfg.MODEL.DEPLOY)

    cls.__init__ = wrapped  # type: ignore[method-assign]
    return cls


class FastForward:
    """Takes the place of a model's ``forward``: predicts by a deployed copy, trains as ever.

    A model that has been trained since it was built, or whose weights or settings have changed
    since it first predicted, predicts in its plain form from then on, so that evaluation in between
    is of the newest weights. So does a copy of a model in training, as moving averages are.
    Settings are numbers and names among the attributes of the model and of its children.
    """

    def __init__(self, model: nn.Module, node: CfgNode) -> None:
        """
        Args:
            model: the owner.
            node: ``MODEL.DEPLOY`` of its config.

        Raises:
            UserError: a key of it has no value that there is.
        """
        self._model = model
        self._settings = settings_of(node)
        self._stays_plain = False
        self._fast: nn.Module | None = None
        self._deployed_state: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "FastForward":
        twin = copy.copy(self)
        twin._model, twin._fast = copy.deepcopy(self._model, memo), None
        twin._stays_plain = self._stays_plain or self._model.training
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._model.training:
            self._stays_plain = True
        if not self._stays_plain:
            state = state_of(self._model)
            if self._fast is None:
                self._fast = deploy(self._model, **self._settings)
                self._deployed_state = state
            elif state != self._deployed_state:
                self._stays_plain = True
                logger.info("Weights or settings have changed since they were deployed: the model "
                            "predicts in its plain form from now on")  # fmt: skip
        if self._stays_plain:
            self._fast = None
            return type(self._model).forward(self._model, *args, **kwargs)
        assert self._fast is not None
        return self._fast(*args, **kwargs)


def state_of(model: nn.Module) -> list[Any]:
    """Returns what differs once a parameter, buffer or setting has been replaced or changed.

    PyTorch counts the changes of a tensor, but not those through ``.data``, which stay unseen, and
    not those of tensors made in inference mode: of these the first number is read.
    """
    tensors = [*model.parameters(), *model.buffers()]
    marks = [
        (id(x), x.data_ptr(), x.device, 0 if x.is_inference() else x._version) for x in tensors
    ]
    firsts: dict[Any, list[Tensor]] = {}
    for x in tensors:
        if x.is_inference() and x.numel():  # as_strided: the first in memory, whatever the layout
            first = x.detach().as_strided((), ())
            firsts.setdefault((x.device, x.dtype), []).append(first)
    numbers = [torch.stack(group).tolist() for group in firsts.values()]
    owners = (model, *model.children())
    plain = (bool, int, float, str, tuple, list)
    settings = [repr(x) for part in owners for x in vars(part).values() if isinstance(x, plain)]
    return [marks, numbers, settings]


def deploy_by_config(model: nn.Module, node: CfgNode) -> nn.Module:
    """Returns a model deployed as ``MODEL.DEPLOY`` says."""
    return deploy(model, **settings_of(node))


def settings_of(node: CfgNode) -> dict[str, Any]:
    """Returns arguments of ``deploy``.

    Args:
        node: ``MODEL.DEPLOY`` of a config.

    Raises:
        UserError: a key has no value that there is.
    """
    settings = {
        "precision": node.PRECISION,
        "compile": node.COMPILE,
        "image_sizes": node.IMAGE_SIZES,
        "compile_after": node.COMPILE_AFTER,
        "keep_memory": node.KEEP_MEMORY,
    }
    Settings(**settings)
    return settings
