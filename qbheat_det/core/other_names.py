# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Names that users of other libraries try, and what to use here instead.

A name that means the same in this package works, such as ``qbheat_det.train``. The errors of all
others come from the two tables below.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ATTRIBUTES = {
    "qbheat_det": {
        "YOLO": "load(weights)",
        "from_pretrained": "load(weights)",
        "load_model": "load(weights)",
        "predict": "load(weights).predict(images)",
    },
    "Detector": {
        "names": "class_names",
        "val": "evaluate(data)",
        "validate": "evaluate(data)",
        "fit": "train(data)",
        "track": "stream(video), which yields the boxes of each frame",
        "eval": "predict, which needs no evaluation mode; model is the PyTorch module",
        "to": "load(weights, device=…)",
        "optimize_for_inference": "deploy()",
    },
    "Detections": {
        "plot": "draw(), which returns RGB pixels",
        "names": "class_names",
        "xyxy": "boxes",
        "conf": "scores",
        "confidence": "scores",
        "cls": "labels",
        "class_id": "instances.pred_classes",
        "to_df": "pandas.DataFrame(list(result))",
        "pandas": "pandas.DataFrame(list(result))",
    },
    # ``results[0]`` is the result of the first image in libraries that always return lists.
    "DetectedBox": dict.fromkeys(
        ("boxes", "plot", "save", "show", "names", "orig_img"),
        "the result without [0]: predict returns one result for one image",
    )
    | {"conf": "score", "confidence": "score", "cls": "class_name", "label": "class_name"},
}
"""What to use instead of an attribute, by the name of its module or class."""

KEYWORDS = {
    "predict": {
        "conf": "threshold",
        "confidence": "threshold",
        "score_threshold": "threshold",
        "source": "images",
        "batch": "batch_size",
        "imgsz": "overrides of INPUT.MIN_SIZE_TEST in qbheat predict",
        "iou": "overrides of the model's NMS_THRESH_TEST in qbheat predict",
        "device": "load(weights, device=…)",
        "save": "Detections.save",
        "stream": "Detector.stream",
    },
    "train": {
        "batch_size": "batch",
        "imgsz": "image_size",
        "lr": 'overrides={"SOLVER.BASE_LR": …}',
        "lr0": 'overrides={"SOLVER.BASE_LR": …}',
        "time": "minutes",
        "project": "output",
        "name": "output",
        "model": "weights",
        "opts": 'overrides={"KEY": value}',
    },
    "evaluate": {"device": "load(weights, device=…)", "source": "data"},
    "export": {"format": "the suffix of output: .onnx", "imgsz": "image_size"},
    "embed": {"source": "images", "batch": "a list of images"},
}
"""What to use instead of a keyword argument, by the name of its function."""


def name_attribute(owner: str, name: str) -> AttributeError:
    """Returns the error for an attribute that a module or class lacks.

    ``owner`` is a key of ``ATTRIBUTES``. The error names what to use instead, if this is known.
    """
    message = f"{owner} has no attribute '{name}'"
    right = ATTRIBUTES[owner].get(name)
    if right is not None:
        message += f": use {right}"
    return AttributeError(message)


class NamesAttributes:
    """Base class of the classes in ``ATTRIBUTES``. Their missing attributes name the right one."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> object:
            if hasattr(type(self), name):  # a property, which raised an error of this type
                return object.__getattribute__(self, name)
            owners = (base.__name__ for base in type(self).__mro__)
            raise name_attribute(next(owner for owner in owners if owner in ATTRIBUTES), name)


def names_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of ``KEYWORDS``.

    For a wrong keyword, it raises a ``TypeError`` that names the right one.
    """
    right = KEYWORDS[function.__name__]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in right:
                raise TypeError(
                    f"{function.__name__}() has no argument '{name}': use {right[name]}"
                )
        return function(*args, **kwargs)

    return checked
