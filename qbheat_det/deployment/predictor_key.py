# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MODEL.DEPLOY.ENABLED`` for those who build a model by Detectron2's own means.

``DefaultPredictor`` builds, loads weights and predicts; nothing of ours is called in between. So a
model that was built with the key deploys a copy of itself when it first predicts.
"""

import functools
from typing import Any, TypeVar

from detectron2.config import CfgNode
from torch import nn

from .deploy import deploy

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

    A model that has been trained since it was built, or whose weights have changed since it first
    predicted, predicts in its plain form, so that evaluation in between is of the newest weights.
    """

    def __init__(self, model: nn.Module, node: CfgNode) -> None:
        """
        Args:
            model: the owner.
            node: ``MODEL.DEPLOY`` of its config.
        """
        self._model = model
        self._node = node
        self._has_trained = False
        self._fast: nn.Module | None = None
        self._versions = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = type(self._model).forward
        if self._model.training or self._has_trained:
            self._has_trained = True
            return plain(self._model, *args, **kwargs)
        if self._fast is None:
            self._fast = deploy_by_config(self._model, self._node)
            self._versions = self._count_changes()
        elif self._versions != self._count_changes():
            return plain(self._model, *args, **kwargs)
        return self._fast(*args, **kwargs)

    def _count_changes(self) -> int:
        return sum(parameter._version for parameter in self._model.parameters())


def deploy_by_config(model: nn.Module, node: CfgNode) -> nn.Module:
    """Returns a model deployed as ``MODEL.DEPLOY`` says."""
    return deploy(
        model,
        precision=node.PRECISION,
        compile=node.COMPILE,
        image_sizes=node.IMAGE_SIZES,
        compile_after=node.COMPILE_AFTER,
    )
