# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reading YAML and command-line overrides without running what a stranger wrote."""

import difflib
import functools
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from detectron2.config import CfgNode

from qbheat_det.core.errors import UserError

from .defaults import get_cfg
from .rules import check_timm_backbones, switch_off_overruled_epochs

_PACKAGE = Path(__file__).resolve().parents[1]


def get_config_path(name: str) -> str:
    """Returns the path of a config that travels with the package.

    Args:
        name: path below ``configs/``, such as ``"coco/mf_detr_211_285M_probe.yaml"``, or of a
            LazyConfig ``"lazy/coco/mf_detr_211_285M_probe.py"``.

    Raises:
        UserError: there is no such file; the sentence names the nearest ones.
    """
    # A wheel holds the folder inside the package, a checkout beside it.
    roots = [_PACKAGE / "configs", _PACKAGE.parent / "configs"]
    for root in roots:
        if (root / name).is_file():
            return str(root / name)
    pattern = "lazy/**/*.py" if name.endswith(".py") else "**/*.yaml"
    known = sorted({str(path.relative_to(root)) for root in roots for path in root.glob(pattern)})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
    raise UserError(f"no config named '{name}'; did you mean {', '.join(near)}?")


def load_config(path: str | os.PathLike[str] | None = None, opts: Sequence[str] = ()) -> CfgNode:
    """Returns the package's default config with a YAML file and ``KEY VALUE`` pairs merged in.

    A schedule in iterations switches off one in epochs that came before it, and the other way
    round: the last word holds.

    Args:
        path: YAML file, or None for the defaults alone. Python tags in it are refused.
        opts: alternating keys and values, as after ``tools/train_net.py``'s flags.

    Raises:
        UserError: the file is missing or not YAML, would run code, or holds a key or a type
            that the config does not know, or names a model that timm does not have.
    """
    cfg = get_cfg()
    layers = [] if path is None else _read_layers(cfg, Path(path))
    if path is not None:
        _merge_file(cfg, str(path), dict(ChainMap(*reversed(layers))))
    if len(opts) % 2:
        raise UserError(f"overrides are KEY VALUE pairs, but '{opts[-1]}' has no partner")
    for key, value in zip(opts[::2], opts[1::2], strict=True):
        present = _check_key(cfg, key, "command line")
        if isinstance(present, float) and value.lstrip("+-").isdecimal():
            value = f"{value}.0"  # yacs takes no integer where a float stands
        try:
            cfg.merge_from_list([key, value])
        except (ValueError, KeyError, AssertionError) as error:
            raise UserError(f"command line, {key}: {_sentence(error)}") from error
    switch_off_overruled_epochs(cfg, [*layers, dict(zip(opts[::2], opts[1::2], strict=True))])
    check_timm_backbones(cfg)
    return cfg


def dump_config(cfg: CfgNode) -> str:
    """Returns a config as YAML that refers to nothing, to travel inside another file."""
    # Detectron2 dumps a list that stands in two places as a reference to the first.
    return str(yaml.dump(yaml.safe_load(cfg.dump()), Dumper=_WithoutReferences))


class _WithoutReferences(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _merge_file(cfg: CfgNode, path: str, values: Mapping[str, object]) -> None:
    """Merges a file whose keys are known to exist; an integer may stand for a float."""
    integers = {
        key: value
        for key, value in values.items()
        if type(value) is int and isinstance(_check_key(cfg, key, path), float)
    }
    for key in integers:  # yacs takes no integer where a float stands
        _put(cfg, key, 0)
    try:
        cfg.merge_from_file(path, allow_unsafe=False)
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(f"{path}: {_sentence(error)}") from error
    for key, value in integers.items():
        _put(cfg, key, float(value))


def _put(cfg: CfgNode, key: str, value: float) -> None:
    *parents, leaf = key.split(".")
    functools.reduce(lambda node, part: node[part], parents, cfg)[leaf] = value


def _read_layers(
    cfg: CfgNode, path: Path, children: tuple[Path, ...] = ()
) -> list[dict[str, object]]:
    """Returns the dotted keys and values of a file and of those below it, the lowest first."""
    absolute = Path(os.path.abspath(path))
    if absolute in children:
        raise UserError(f"{path} and {children[-1]} inherit from each other by _BASE_")
    if not path.is_file():
        raise UserError(f"config file '{path}' does not exist")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not plain YAML: {_sentence(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no config: its top level must be a mapping of keys")
    base = content.pop("_BASE_", None)
    layers = []
    parents = [base] if isinstance(base, str) else base or []
    if not isinstance(parents, list) or not all(isinstance(name, str) for name in parents):
        raise UserError(f"{path}: _BASE_ must be the path of a YAML file, but is {base!r}")
    for parent in parents:
        above = Path(os.path.join(path.parent, os.path.expanduser(parent)))
        layers += _read_layers(cfg, above, (*children, absolute))
    values = dict(_leaves(content))
    for key in values:
        _check_key(cfg, key, str(path))
    return [*layers, values]


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_key(cfg: CfgNode, key: str, where: str) -> object:
    """Returns the present value of a key, or raises a ``UserError``."""
    node: object = cfg
    for part in key.split("."):
        if not isinstance(node, CfgNode) or part not in node:
            known = [name for name, _ in _leaves(cfg)]
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UserError(f"{where}: unknown config key '{key}'; did you mean '{near[0]}'?")
        node = node[part]
    if isinstance(node, CfgNode):
        raise UserError(f"{where}: '{key}' is a group of keys and takes no value of its own")
    return node


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())
