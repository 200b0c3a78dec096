# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Depthwise-separable convolutions for heads and feature pyramids."""

from torch import nn


def separable_conv(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> nn.Sequential:
    """Returns a depthwise convolution and a 1x1 convolution, without norm or activation.

    Like a dense convolution, it maps (N, C, H, W) to (N, C', H / stride, W / stride), rounded up.
    """
    padding = kernel_size // 2
    depthwise = nn.Conv2d(
        in_channels, in_channels, kernel_size, stride, padding, groups=in_channels, bias=False
    )
    return nn.Sequential(depthwise, nn.Conv2d(in_channels, out_channels, 1))
