# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parses untrusted YAML. Does not import PyTorch or Detectron2."""

from dataclasses import dataclass
from typing import Any

import yaml

from .text import one_line

# The loader of libyaml is ten times as fast.
Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TextLoader: type = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
# Limits of YAML after its aliases are expanded. A long text counts as several values.
_MAX_DEPTH = 100
_MAX_NODES = 1_000_000
_CHARACTERS_OF_NODE = 100


def load_yaml(text: str, *, scalars_as_text: bool = False) -> Any:
    """Parses untrusted YAML.

    Args:
        text: the YAML.
        scalars_as_text: whether names such as "off" and "0123" stay as they are written.

    Raises:
        YAMLError: the text is invalid, or too deeply nested for libyaml; its aliases expand to too
            many values; or a value cannot be represented, such as a date in the 13th month.
    """
    loader = _TextLoader if scalars_as_text else Loader
    try:
        _check_expansion(text)
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # the constructors of values raise errors of many types
        raise yaml.YAMLError(one_line(error)) from error


@dataclass
class _Extent:
    """How much a value of YAML contains after its aliases are expanded.

    Attributes:
        anchor: the name by which aliases refer to the value; None if it has none.
        num_nodes: number of scalars, lists and mappings, including itself.
        depth: levels of lists and mappings; 0 for a scalar.
    """

    anchor: str | None
    num_nodes: int = 1
    depth: int = 0


def _check_expansion(text: str) -> None:
    """Raises a ``YAMLError`` if YAML is too large or too deep after its aliases are expanded."""
    anchored: dict[str, _Extent] = {}
    around = [_Extent(None, num_nodes=0)]  # the document, then the opened lists and mappings
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            anchored.pop(event.anchor, None)  # the value has no end yet, so it has no extent
            around.append(_Extent(event.anchor, depth=1))
            value = _Extent(None, num_nodes=0)
        elif isinstance(event, yaml.CollectionEndEvent):
            value = around.pop()
        elif isinstance(event, yaml.ScalarEvent):
            value = _Extent(event.anchor, 1 + len(event.value) // _CHARACTERS_OF_NODE)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise yaml.YAMLError(f"the alias '*{event.anchor}' has no value, or is in its own")
            value = anchored[event.anchor]
        else:
            continue
        if value.anchor is not None:
            anchored[value.anchor] = value
        outer = around[-1]
        outer.num_nodes += value.num_nodes
        outer.depth = max(outer.depth, value.depth + 1)
        if outer.num_nodes > _MAX_NODES:
            raise yaml.YAMLError(f"it has, or its aliases expand to, over {_MAX_NODES:,} values")
        if len(around) - 1 + value.depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"values are nested in more than {_MAX_DEPTH} levels")
