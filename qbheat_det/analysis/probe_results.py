# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracies of probes as points of charts: by decoder, by images seen, seeds and errors."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, order=True)
class Decoder:
    """What a probe reads features with, in the order of its power.

    Attributes:
        power: 0 for nearest neighbours, 1 for a linear classifier, 2 for transformer blocks.
        depth: k of tran-k; 0 of others.
        width: of its blocks; 0 of others.
        name: "kNN", "linear" or "tran-k".
    """

    power: int
    depth: int
    width: int
    name: str

    @property
    def title(self) -> str:
        """What a reader calls it."""
        return f"{self.name}, width {self.width}" if self.width else self.name


@dataclass(frozen=True)
class ProbeResult:
    """One probe of one backbone. Shares are in per cent.

    Attributes:
        series: what was pre-trained: one run with its checkpoints, or one objective with its
            seeds; random backbones are one series.
        backbone: file of the weights, or "random, seed 1".
        images_seen: in training; 0 for a random backbone, None where unknown.
        recalibrated: whether BatchNorm's statistics are of whole images.
        decoder: of the probe.
        top1: images whose class comes first.
        error: standard error of ``top1`` over the images.
    """

    series: str
    backbone: str
    images_seen: int | None
    recalibrated: bool
    decoder: Decoder
    top1: float
    error: float

    @property
    def is_random(self) -> bool:
        """Whether nothing was trained."""
        return self.images_seen == 0


@dataclass(frozen=True)
class Point:
    """The mean of backbones that differ in their seed alone.

    Attributes:
        top1: mean, per cent.
        error: standard error over the images of one backbone, the mean of all.
        number: of backbones.
    """

    top1: float
    error: float
    number: int


def choose_statistics(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """Returns of each series those with statistics of whole images, if it has any.

    Random backbones keep both, the others under a name of their own: the two are far apart, and
    either may be the higher.
    """
    anew = {result.series for result in results if result.recalibrated}
    chosen = []
    for result in results:
        if result.recalibrated or result.series not in anew:
            chosen.append(result)
        elif result.is_random:
            chosen.append(replace(result, series=f"{result.series}, as initialised"))
    return chosen


def place_by_decoder(results: Sequence[ProbeResult]) -> dict[str, dict[Decoder, Point]]:
    """Returns the points of each series by decoder, each of the backbones that saw most images."""
    points: dict[str, dict[Decoder, Point]] = {}
    for series, own in _group(results, lambda result: result.series).items():
        most = max(result.images_seen or 0 for result in own)
        last = [result for result in own if (result.images_seen or 0) == most]
        by_decoder = _group(last, lambda result: result.decoder)
        points[series] = {decoder: _average(by_decoder[decoder]) for decoder in sorted(by_decoder)}
    return points


def place_by_images(
    results: Sequence[ProbeResult], decoder: Decoder
) -> dict[str, dict[int, Point]]:
    """Returns the points of each series by images seen, rising, under one decoder.

    Random backbones are at 0; those that do not tell are left out.
    """
    points: dict[str, dict[int, Point]] = {}
    own = [result for result in results if result.decoder == decoder]
    for series, same in _group(own, lambda result: result.series).items():
        by_images = _group(same, lambda result: result.images_seen)
        known = sorted(seen for seen in by_images if seen is not None)
        if known:
            points[series] = {seen: _average(by_images[seen]) for seen in known}
    return points


def list_decoders(results: Iterable[ProbeResult]) -> list[Decoder]:
    """Returns the decoders that there are, the weakest first."""
    return sorted({result.decoder for result in results})


def _average(results: Sequence[ProbeResult]) -> Point:
    return Point(
        top1=statistics.fmean(result.top1 for result in results),
        error=statistics.fmean(result.error for result in results),
        number=len(results),
    )


def _group(
    results: Iterable[ProbeResult], key: Callable[[ProbeResult], _Key]
) -> dict[_Key, list[ProbeResult]]:
    found: dict[_Key, list[ProbeResult]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found
