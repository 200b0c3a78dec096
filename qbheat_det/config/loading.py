# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads YAML and command-line overrides without running code, and checks values."""

import ast
import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.core.yaml_text import load_yaml

from .defaults import REMOVED_KEYS, get_cfg

_PACKAGE = Path(__file__).resolve().parents[1]
# The dumper of libyaml is ten times as fast.
_Dumper: type = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
# Maps keys whose unit is epochs to Detectron2's keys in iterations, which are computed from them.
EPOCH_KEYS = {
    "SOLVER.EPOCHS": "SOLVER.MAX_ITER",
    "SOLVER.STEP_EPOCHS": "SOLVER.STEPS",
    "SOLVER.WARMUP_EPOCHS": "SOLVER.WARMUP_ITERS",
    "SOLVER.CHECKPOINT_EPOCHS": "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_EPOCHS": "TEST.EVAL_PERIOD",
}
# Packages whose errors in constructors mean that a value of the config is wrong.
_KNOWN_CODE = sys.stdlib_module_names | {
    *("qbheat_det", "detectron2", "fvcore", "iopath", "yacs"),
    *("torch", "torchvision", "timm", "numpy"),
}
TIMM_PREFIX = "timm:"
"""Prefix that marks the name of a timm model as a backbone in a config."""
Rules = Mapping[str, tuple[Callable[[Any], object], str]]
"""Maps a key to a function that checks its value, and a text about the expected values."""


def get_config_path(name: str | os.PathLike[str]) -> str:
    """Returns the path of a config file, or of a config that is shipped with the package.

    Args:
        name: path of a file, or of a shipped config below ``configs/``, such as
            ``"coco/mf_detr_211_285M_probe.yaml"``, with or without ``configs/``.

    Raises:
        UserError: there is no such file; the message names shipped configs with similar names.
    """
    if os.path.isfile(name):
        return str(name)
    short = os.fspath(name).removeprefix("configs/")
    # The folder is inside the package in a wheel, and next to it in a checkout.
    roots = [_PACKAGE / "configs", _PACKAGE.parent / "configs"]
    for root in roots:
        if os.path.isfile(root / short):
            return str(root / short)
    names: set[str] = set()
    for root in roots:
        names.update(str(path.relative_to(root)) for path in root.rglob("*.yaml"))
    shipped = sorted(names)
    similar = difflib.get_close_matches(short, shipped, n=3, cutoff=0.3) or shipped[:3]
    raise UserError(f"config file '{name}' does not exist; did you mean {', '.join(similar)}?")


def load_config(path: str | os.PathLike[str] | None = None, opts: Sequence[str] = ()) -> CfgNode:
    """Merges a YAML file and ``KEY VALUE`` pairs into the package's default config.

    The sources are, in this order, the file's ``_BASE_``, the file, and ``opts``. A later source
    overrides the values of an earlier one. Keys in epochs, such as ``SOLVER.EPOCHS``, and their
    counterparts in iterations, such as ``SOLVER.MAX_ITER``, override each other.

    Args:
        path: path of a YAML file, or name of a shipped config; None for the defaults. Python tags
            in the file are refused.
        opts: alternating keys and values, as after the flags of ``tools/train_net.py``.

    Raises:
        UserError: the file is missing, is not YAML or would run code; a key is unknown or its value
            has the wrong type; or a timm model does not exist.
    """
    cfg = get_cfg()
    layers: list[tuple[str, dict[str, object]]] = []  # (source, values by dotted key)
    if path is not None:
        layers += _read_layers(Path(get_config_path(path)))
    if len(opts) % 2:
        raise UserError(f"overrides are KEY VALUE pairs, but '{opts[-1]}' has no partner")
    keys = opts[::2]
    layers.append(("command line", dict(zip(keys, opts[1::2], strict=True))))
    for source, values in layers:
        for key, value in values.items():
            _set(cfg, key, value, source)
    switch_off_overruled_epochs(cfg, [values for _, values in layers])
    for key in ("MODEL.BACKBONE.NAME", "MODEL.FPN.BOTTOM_UP"):
        name = get_value(cfg, key)
        if name.startswith(TIMM_PREFIX):
            try:
                check_timm_name(name.removeprefix(TIMM_PREFIX))
            except UserError as error:
                raise UserError(f"{key} '{name}': {error}") from None
    return cfg


def dump_config(cfg: CfgNode) -> str:
    """Returns a config as YAML. This is ten times as fast as ``cfg.dump()``."""
    return str(yaml.dump(_to_dict(cfg), Dumper=_WithoutReferences))


class _WithoutReferences(_Dumper):
    """Writes a list that occurs twice in full, not as a reference to the first occurrence."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _to_dict(cfg: CfgNode) -> dict[str, object]:
    """Returns a config as nested dicts."""
    values = {}
    for key, value in cfg.items():
        values[key] = _to_dict(value) if isinstance(value, CfgNode) else value
    return values


def read_values(text: str) -> dict[str, object]:
    """Returns the values of a config in YAML, by dotted key."""
    return dict(list_leaves(load_yaml(text) or {}))


def with_values(cfg: CfgNode, values: Mapping[str, object] | None = None) -> CfgNode:
    """Returns an unfrozen copy of a config, changed by ``values``.

    The keys of ``values`` are dotted, such as "MODEL.DEVICE".
    """
    changed: CfgNode = cfg.clone()
    changed.defrost()
    for key, value in (values or {}).items():
        *parents, name = key.split(".")
        node = changed
        for parent in parents:
            node = node[parent]
        node[name] = value
    return changed


def list_leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of each entry of a config or of nested dicts.

    All keys begin with ``prefix``. An empty dict counts as a value.
    """
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from list_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def get_value(cfg: CfgNode, key: str) -> Any:
    """Returns the value of a dotted key, such as "MODEL.DEVICE"."""
    value: Any = cfg
    for name in key.split("."):
        value = value[name]
    return value


def _set(cfg: CfgNode, key: str, value: object, source: str) -> None:
    """Sets the value of a dotted key; errors mention ``source``, a file or the command line."""
    try:
        present = get_value(cfg, key)
    except (KeyError, TypeError):
        if key in REMOVED_KEYS:
            if str(value) == str(REMOVED_KEYS[key]):
                return
            raise UserError(
                f"{source}: '{key}: {value}' is of an earlier version, and this one cannot do it"
            ) from None
        known = [name for name, _ in list_leaves(cfg)]
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise UserError(
            f"{source}: unknown config key '{key}'; did you mean '{nearest}'?"
        ) from None
    if isinstance(present, CfgNode):
        raise UserError(f"{source}: '{key}' is a group of keys and takes no value of its own")
    try:
        is_integer = str(value).lstrip("+-").isdecimal()
        if isinstance(present, float) and is_integer:
            value = float(str(value))  # yacs refuses an integer as the value of a float
        if present is not None and str(value) == "None":  # yacs accepts None for any type
            raise ValueError(f"there is no value, expected {type(present).__name__}")
        cfg.merge_from_list([key, value])
    except Exception as error:  # yacs parses text with ast.literal_eval, which may raise any
        raise UserError(f"{source}, {key}: {one_line(error)}") from error


def _read_layers(
    path: Path, children: tuple[Path, ...] = ()
) -> list[tuple[str, dict[str, object]]]:
    """Reads a config file and, recursively, the files that its ``_BASE_`` names.

    Returns (path, values by dotted key) of each file. A base comes before the file that names it.
    ``children`` are the files that led to this one by ``_BASE_``, as absolute paths.
    """
    absolute = Path(os.path.abspath(path))
    if absolute in children:
        raise UserError(f"{path} and {children[-1]} inherit from each other by _BASE_")
    if not os.path.isfile(path):  # Path.is_file raises an error for a name of 300 characters
        raise UserError(f"config file '{path}' does not exist")
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not plain YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a config: its top level must be a mapping of keys")
    base = content.pop("_BASE_", None)  # a path, or a list of paths
    if isinstance(base, str):
        base_paths = [base]
    else:
        base_paths = base or []
    if not isinstance(base_paths, list) or not all(isinstance(name, str) for name in base_paths):
        raise UserError(f"{path}: _BASE_ must be the path of a YAML file, but is {base!r}")
    layers = []
    for name in base_paths:
        base_path = path.parent / os.path.expanduser(name)
        layers += _read_layers(base_path, (*children, absolute))
    values = dict(list_leaves(content))
    first_stage = values.get("SOLVER.FIRST_STAGE")
    if first_stage:  # a path relative to this file, or the name of a shipped config
        relative_to_file = absolute.parent / os.path.expanduser(str(first_stage))
        if os.path.isfile(relative_to_file):
            values["SOLVER.FIRST_STAGE"] = str(relative_to_file)
    return [*layers, (str(path), values)]


def switch_off_overruled_epochs(cfg: CfgNode, layers: Sequence[Mapping[str, object]]) -> None:
    """Resets keys in epochs to their defaults, in place, if a layer overrides them by iterations.

    For example, ``SOLVER.MAX_ITER 100`` on the command line overrides ``SOLVER.EPOCHS`` in a file.
    A layer that sets iterations, and 0 epochs beside them, means the iterations.

    Args:
        cfg: the config with all layers merged.
        layers: values by dotted key in each file and on the command line; the lowest ``_BASE_``
            comes first and the command line last.

    Raises:
        UserError: a layer sets both epochs and iterations. The complete config of an earlier run
            may set both, because its iterations were computed from its epochs.
    """
    overridden: set[str] = set()  # keys in epochs
    for layer in layers:
        is_complete_config = {*EPOCH_KEYS, *EPOCH_KEYS.values()} <= set(layer)
        for epoch_key, iteration_key in EPOCH_KEYS.items():
            sets_epochs = epoch_key in layer
            sets_iterations = iteration_key in layer
            is_on = sets_epochs and _is_on(layer[epoch_key])
            if sets_iterations and not is_on:
                overridden.add(epoch_key)
            elif sets_epochs:
                overridden.discard(epoch_key)
            if sets_iterations and is_on and not is_complete_config:
                raise UserError(
                    f"{epoch_key} {layer[epoch_key]} and {iteration_key} {layer[iteration_key]} "
                    "mean the same thing: leave one out"
                )
    defaults = get_cfg()
    for key in overridden:
        section, name = key.split(".")
        cfg[section][name] = defaults[section][name]


def _is_on(value: object) -> bool:
    """Whether a value in epochs is not 0, empty or None. On the command line, values are text."""
    if isinstance(value, str):
        value = ast.literal_eval(value)
    return bool(value)


def check_timm_name(name: str) -> None:
    """Checks the name of a timm model.

    Raises:
        UserError: timm has no such model, or the name includes a tag of weights.
    """
    import timm  # takes seconds, and most configs name none of its models

    model, _, tag = name.partition(".")
    if not timm.is_model(model):
        similar = difflib.get_close_matches(model, timm.list_models(), n=3, cutoff=0.3)
        raise UserError(
            f"timm {timm.__version__} has no model '{model}'; did you mean "
            f"{', '.join(similar) or 'resnet50'}?"
        )
    if tag:
        raise UserError(
            f"'{name}' names weights, the model is '{model}': to start from these weights, set "
            f"MODEL.WEIGHTS to 'timm://{name}'"
        )


def find_memory_format(cfg: CfgNode) -> torch.memory_format:
    """Returns the memory format of feature maps that ``MODEL.CHANNELS_LAST`` names.

    None means channels-last on CPUs, and contiguous on other devices.
    """
    channels_last = cfg.MODEL.CHANNELS_LAST
    if channels_last not in (None, True, False):  # yacs accepts any type in place of None
        raise UserError(
            f"MODEL.CHANNELS_LAST must be True, False or None, but is '{channels_last}'"
        )
    if channels_last is None:
        channels_last = torch.device(cfg.MODEL.DEVICE).type == "cpu"
    if channels_last:
        return torch.channels_last
    return torch.contiguous_format


def one_of(*names: str) -> tuple[Callable[[Any], object], str]:
    """Returns a rule for ``check_values``: the value must be one of ``names``."""
    return lambda value: value in names, f"one of {', '.join(names)}"


def at_least(least: int) -> tuple[Callable[[Any], object], str]:
    """Returns a rule for ``check_values``: the value must be at least ``least``."""
    return lambda value: value >= least, f"at least {least}"


def check_values(cfg: CfgNode, rules: Rules) -> None:
    """Raises a ``UserError`` that names the key if a value of a config breaks its rule."""
    for key, (is_valid, expected) in rules.items():
        value = get_value(cfg, key)
        if not is_valid(value):
            raise UserError(f"{key} is {value!r}, expected {expected}")


@contextlib.contextmanager
def refuse_bad_values(where: str) -> Iterator[None]:
    """Context that converts errors of constructors to a ``UserError``, as values are wrong.

    An error in code of others, such as a user's own model, is raised as it is. ``where`` is the
    source of the values, for the message, such as "this config".
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _passes_code_of_others(error):
            raise
        reason = repr(error)
        if isinstance(error, ValueError):
            reason = str(error)
        raise UserError(
            f"no model can be built from {where}: {reason} (QBHEAT_TRACEBACK=1 shows where)"
        ) from error


def _passes_code_of_others(error: Exception) -> bool:
    """Returns whether an error was raised in, or below, code that is not in ``_KNOWN_CODE``."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _KNOWN_CODE:
            return True
    return False
