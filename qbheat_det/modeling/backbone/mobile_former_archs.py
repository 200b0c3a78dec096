# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Widths of Mobile-Former: the QB-Heat paper's three sizes and the seven ImageNet networks.

Papers: "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al., arXiv:2211.13228,
Table 8; "Mobile-Former: Bridging MobileNet and Transformer", Chen et al., arXiv:2108.05895, whose
authors published ImageNet weights of "508M" to "26M" (github.com/AAboys/MobileFormer).

Deviations from Table 8:

* Block 7 of MF-1.0G is 576 -> 176. The table repeats the row above (288 -> 96), which contradicts
  the paper's parameter count.
* The table does not state the second hidden width of downsampling blocks. Here it is 4, 3 and 4
  times the output width at strides 4, 8 and 16. No other multiples give the multiply-adds of
  Table 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from detectron2.layers import ShapeSpec

from qbheat_det.core.errors import UserError

BlockKind = Literal["lite", "lite_down", "down", "plain"]


@dataclass(frozen=True)
class BlockSpec:
    """Kind and widths of a block.

    "down" and "plain" are Mobile-Former blocks. "lite" and "lite_down" are blocks without tokens.
    "down" and "lite_down" blocks halve height and width of the feature map, and start a stage.

    Attributes:
        kind: type of the block.
        hidden: channels after the first convolution.
        out: channels of the output.
        second_hidden: channels after the second depthwise convolution, in "down" blocks only.
    """

    kind: BlockKind
    hidden: int
    out: int
    second_hidden: int = 0

    @property
    def halves(self) -> bool:
        """Whether the block halves height and width of the feature map."""
        return self.kind in ("down", "lite_down")


@dataclass(frozen=True)
class MobileFormerArch:
    """Widths of a Mobile-Former, in the order of Table 8 of the QB-Heat paper.

    Attributes:
        num_tokens: number of global tokens.
        token_dim: width of the tokens.
        stem: channels after the first convolution.
        rows: the fields of a ``BlockSpec`` for each block.
        expanded: channels after the final 1x1 convolution.
        last_bridge: whether a Mobile->Former bridge follows the last block, as in the ImageNet
            networks. The QB-Heat paper's networks have none.

    Raises:
        ValueError: the widths do not fit each other.
    """

    num_tokens: int
    token_dim: int
    stem: int
    rows: Sequence[Sequence[Any]]
    expanded: int
    last_bridge: bool = False

    def __post_init__(self) -> None:
        kinds = [block.kind for block in self.blocks]
        if not kinds or set(kinds) - set(get_args(BlockKind)):
            raise ValueError(f"block kinds are {get_args(BlockKind)}, not {kinds}")
        if self.token_dim % 4:
            raise ValueError(f"the token width must be divisible by 4, not {self.token_dim}")
        channels = self.stem
        for number, block in enumerate(self.blocks, start=1):
            self._check(number, block, channels)
            channels = block.out

    @cached_property
    def blocks(self) -> list[BlockSpec]:
        """The blocks that ``rows`` describes."""
        return [BlockSpec(*row) for row in self.rows]

    def output_shapes(self) -> dict[str, ShapeSpec]:
        """Returns the shape of every output of the network by name, finest feature map first."""
        stride = 2
        shapes = {"s2": ShapeSpec(channels=self.stem, stride=stride)}
        for block in self.blocks:
            if block.halves:
                stride *= 2
            # The last block at a stride replaces the blocks before it.
            shapes[f"s{stride}"] = ShapeSpec(channels=block.out, stride=stride)
        shapes[f"s{stride}_expanded"] = ShapeSpec(channels=self.expanded, stride=stride)
        return {**shapes, "tokens": ShapeSpec(channels=self.token_dim)}

    @staticmethod
    def _check(number: int, block: BlockSpec, channels: int) -> None:
        """Raises a ``ValueError`` if a block cannot process a map with ``channels`` channels."""
        where = f"block {number} ({block.kind}, {channels} -> {block.hidden} -> {block.out})"
        if block.kind == "lite" and block.out != channels:
            raise ValueError(f"{where}: a lite block keeps its width")
        if block.kind != "plain" and block.hidden % channels:
            raise ValueError(f"{where}: the depthwise convolution expands by a whole factor")
        if block.kind == "down" and (not block.second_hidden or block.second_hidden % block.out):
            raise ValueError(f"{where}: second width {block.second_hidden} is no multiple of out")
        if block.kind in ("down", "plain") and (channels % 2 or block.out % 2):
            raise ValueError(f"{where}: the bridges have two heads and need even widths")


# fmt: off
_SMALLEST = MobileFormerArch(
    num_tokens=3, token_dim=128, stem=8, expanded=576, last_bridge=True,
    rows=[
        ("lite_down", 24, 12), ("plain", 36, 12),                                     # 1/4
        ("down", 72, 24, 96), ("plain", 72, 24),                                      # 1/8
        ("down", 144, 48, 192), ("plain", 192, 48), ("plain", 288, 64),               # 1/16
        ("down", 384, 96, 384), ("plain", 576, 96),                                   # 1/32
    ],
)
MOBILE_FORMER_ARCHS: dict[str, MobileFormerArch] = {
    "285M": MobileFormerArch(
        num_tokens=6, token_dim=192, stem=16, expanded=720,
        rows=[
            ("lite", 32, 16),                                                         # 1/2
            ("down", 96, 28, 112), ("plain", 84, 28),                                 # 1/4
            ("down", 168, 48, 144), ("plain", 144, 48), ("plain", 144, 48),           # 1/8
            ("down", 240, 80, 320), ("plain", 320, 88), ("plain", 480, 88),           # 1/16
            ("plain", 528, 120), ("plain", 720, 120), ("plain", 720, 120),
        ],
    ),
    "1.0G": MobileFormerArch(
        num_tokens=6, token_dim=256, stem=32, expanded=1440,
        rows=[
            ("lite", 64, 32),
            ("down", 192, 56, 224), ("plain", 168, 56),
            ("down", 336, 96, 288), ("plain", 288, 96), ("plain", 288, 96),
            ("down", 576, 176, 704), ("plain", 704, 176), ("plain", 704, 176),
            ("plain", 1056, 240), ("plain", 1440, 240), ("plain", 1440, 240),
        ],
    ),
    "3.7G": MobileFormerArch(
        num_tokens=6, token_dim=256, stem=64, expanded=2880,
        rows=[
            ("lite", 128, 64),
            ("down", 384, 112, 448), ("plain", 336, 112),
            ("down", 672, 192, 576), ("plain", 576, 192), ("plain", 576, 192),
            ("down", 1152, 352, 1408), ("plain", 1408, 352), ("plain", 1408, 352),
            ("plain", 2112, 480), ("plain", 2880, 480), ("plain", 2880, 480),
        ],
    ),
    "508M": MobileFormerArch(
        num_tokens=6, token_dim=192, stem=24, expanded=1440, last_bridge=True,
        rows=[
            ("lite", 48, 24),                                                         # 1/2
            ("down", 144, 40, 160), ("plain", 120, 40),                               # 1/4
            ("down", 240, 72, 288), ("plain", 216, 72),                               # 1/8
            ("down", 432, 128, 512), ("plain", 512, 128),                             # 1/16
            ("plain", 768, 176), ("plain", 1056, 176),
            ("down", 1056, 240, 960), ("plain", 1440, 240), ("plain", 1440, 240),     # 1/32
        ],
    ),
    "294M": MobileFormerArch(
        num_tokens=6, token_dim=192, stem=16, expanded=1152, last_bridge=True,
        rows=[
            ("lite", 32, 16),
            ("down", 96, 24, 96), ("plain", 96, 24),
            ("down", 144, 48, 192), ("plain", 192, 48),
            ("down", 288, 96, 384), ("plain", 384, 96), ("plain", 576, 128), ("plain", 768, 128),
            ("down", 768, 192, 768), ("plain", 1152, 192), ("plain", 1152, 192),
        ],
    ),
    "214M": MobileFormerArch(
        num_tokens=6, token_dim=192, stem=12, expanded=960, last_bridge=True,
        rows=[
            ("lite", 24, 12),
            ("down", 72, 20, 80), ("plain", 60, 20),
            ("down", 120, 40, 160), ("plain", 160, 40),
            ("down", 240, 80, 320), ("plain", 320, 80), ("plain", 480, 112), ("plain", 672, 112),
            ("down", 672, 160, 640), ("plain", 960, 160), ("plain", 960, 160),
        ],
    ),
    "151M": MobileFormerArch(
        num_tokens=6, token_dim=192, stem=12, expanded=768, last_bridge=True,
        rows=[
            ("lite", 24, 12),
            ("down", 72, 16, 64), ("plain", 48, 16),
            ("down", 96, 32, 128), ("plain", 96, 32),
            ("down", 192, 64, 256), ("plain", 256, 64), ("plain", 384, 88), ("plain", 528, 88),
            ("down", 528, 128, 512), ("plain", 768, 128), ("plain", 768, 128),
        ],
    ),
    "96M": MobileFormerArch(
        num_tokens=4, token_dim=128, stem=12, expanded=768, last_bridge=True,
        rows=[
            ("lite", 24, 12),
            ("down", 72, 16, 64),
            ("down", 96, 32, 128), ("plain", 96, 32),
            ("down", 192, 64, 256), ("plain", 256, 64), ("plain", 384, 88),
            ("down", 528, 128, 512), ("plain", 768, 128),
        ],
    ),
    # The grouped convolutions and channel shuffles of "26M" are stored as dense weights here.
    **dict.fromkeys(("52M", "26M"), _SMALLEST),
}
# fmt: on


def find_arch(arch: MobileFormerArch | Mapping[str, Any] | str) -> MobileFormerArch:
    """Returns the widths of a network from their name, or from their fields by name.

    Raises a ``UserError`` if there is no such name.
    """
    if isinstance(arch, MobileFormerArch):
        return arch
    if not isinstance(arch, str):
        return MobileFormerArch(**arch)
    if arch not in MOBILE_FORMER_ARCHS:
        raise UserError(f"arch is one of {[*MOBILE_FORMER_ARCHS]}, not '{arch}'")
    return MOBILE_FORMER_ARCHS[arch]
