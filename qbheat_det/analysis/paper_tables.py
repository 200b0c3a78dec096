# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The QB-Heat paper's printed multiply-adds and parameters beside this package's counts.

Self-Supervised Learning based on Heat Equation, arXiv:2211.13228, Tables 1, 5, 6, 7, 14 and 15.
The paper names no counting rule. The rules here are the ones under which most cells agree:
detection and linear classifiers by EXT, transformer classifiers by CORE; parameters of a detection
backbone without BatchNorm's scale and offset, because a frozen backbone holds them as buffers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .components import (
    Counts,
    backbone_counts,
    classifier_counts,
    convolution_madds_of_p6,
    mf_decoder_counts,
    retinanet_counts,
)

# Printed figures, as strings because their last digit sets the precision of a match.
_LINEAR_MADDS = {"285M": ("285", "M"), "1.0G": ("1.0", "G"), "3.7G": ("3.7", "G")}
_LINEAR_PARAMS = {"285M": "5.8", "1.0G": "13.5"}
_BACKBONE = {"3.7G": ("77.5", "25.0"), "1.0G": ("20.4", "11.7"), "285M": ("5.6", "4.9")}
_MF_DECODER = {
    (5, 2, 2): {"3.7G": ("34.6", "19.4"), "1.0G": ("32.3", "18.6"), "285M": ("31.1", "18.2")},
    (2, 1, 1): {"3.7G": ("15.7", "9.2"), "1.0G": ("13.4", "8.4"), "285M": ("12.2", "8.0")},
}
_TRANSFORMER = {
    (6, 1): {"285M": ("0.4", "6"), "1.0G": ("1.4", "15"), "3.7G": ("5.5", "35")},
    (15, 4): {"285M": ("0.7", "7"), "1.0G": ("2.6", "20"), "3.7G": ("9.9", "57")},
}
# RetinaNet: multiply-adds with the backbone's, parameters, and the map that P6 must start from
# for the multiply-adds to agree. No one choice fits all three sizes.
_RETINANET = {
    "3.7G": ("237.7", "61.4", "s16_expanded"),
    "1.0G": ("178.1", "17.2", None),
    "285M": ("163.1", "9.5", "s16"),
}

_SCALES = {"G": 10**9, "M": 10**6}
_ALL_PARAMS = "all parameters"
_NO_BN_PARAMS = "parameters of the backbone without BatchNorm's scale and offset"


@dataclass(frozen=True)
class PaperCell:
    """One printed cell.

    Attributes:
        table: number of the paper's table.
        cell: what the figure belongs to, in words.
        unit: "G" (10^9) or "M" (10^6).
        paper: the printed figure.
        ours: the count in that unit, not rounded.
        match: whether ours rounds to the printed digits.
        rule: how ours was counted.
        match_one_rule: whether it would also match with EXT and all parameters, the same rule
            for every cell.
    """

    table: int
    cell: str
    unit: str
    paper: float
    ours: float
    match: bool
    rule: str
    match_one_rule: bool


def compare_with_paper() -> list[PaperCell]:
    """Builds and counts every component; takes about a minute on one core."""
    return [
        *_linear_cells(),
        *_mf_detr_cells(),
        *_transformer_cells(6, 1),
        *_whole_detector_cells(),
        *_retinanet_cells(),
        *_transformer_cells(15, 4),
    ]


def _linear_cells() -> Iterator[PaperCell]:
    for variant, (printed, unit) in _LINEAR_MADDS.items():
        counts = classifier_counts(variant, 0)
        where = "Section 6, not in the table" if variant == "3.7G" else "lin"
        yield _madds(1, f"MF-{variant} MAdds ({where})", printed, unit, counts)
        if variant in _LINEAR_PARAMS:
            name = f"MF-{variant} params (lin)"
            yield _params(1, name, _LINEAR_PARAMS[variant], counts.params, counts.params)


def _mf_detr_cells() -> Iterator[PaperCell]:
    for variant, (madds, params) in _BACKBONE.items():
        counts = backbone_counts(variant)
        yield _madds(5, f"backbone MF-{variant} MAdds", madds, "G", counts)
        name = f"backbone MF-{variant} params"
        yield _params(5, name, params, counts.params_no_bn, counts.params, _NO_BN_PARAMS)
    for num_blocks, rows in _MF_DECODER.items():
        head = "MF-Dec-" + "".join(map(str, num_blocks))
        for variant, (madds, params) in rows.items():
            counts = mf_decoder_counts(variant, num_blocks)
            yield _madds(5, f"{head} on MF-{variant} MAdds", madds, "G", counts)
            name = f"{head} on MF-{variant} params"
            yield _params(5, name, params, counts.params, counts.params)


def _transformer_cells(table: int, depth: int) -> Iterator[PaperCell]:
    for variant, (madds, params) in _TRANSFORMER[table, depth].items():
        counts = classifier_counts(variant, depth)
        name = f"MF-{variant} + tran-{depth}"
        yield _cell(table, f"{name} MAdds", madds, "G", counts.core, counts.ext, "MAdds by CORE")
        yield _params(table, f"{name} params", params, counts.params, counts.params)


def _whole_detector_cells() -> Iterator[PaperCell]:
    backbone, decoder = backbone_counts("3.7G"), mf_decoder_counts("3.7G", (5, 2, 2))
    madds = backbone.ext + decoder.ext
    yield _cell(7, "QB-MF-DETR MAdds", "112", "G", madds, madds, "MAdds by EXT")
    params, all_params = backbone.params_no_bn, backbone.params
    yield _params(
        7,
        "QB-MF-DETR params",
        "44",
        params + decoder.params,
        all_params + decoder.params,
        _NO_BN_PARAMS,
    )


def _retinanet_cells() -> Iterator[PaperCell]:
    for variant, (madds, params, p6_from) in _RETINANET.items():
        counts = retinanet_counts(variant)
        p6, channels = convolution_madds_of_p6(variant, p6_from)
        rule = f"P6 from {channels} channels" if p6_from else "no P6"
        total = backbone_counts(variant).ext + counts.core + p6
        yield _cell(
            14,
            f"RetinaNet on MF-{variant} MAdds, backbone included",
            madds,
            "G",
            total,
            total,
            f"MAdds by EXT, {rule}",
        )
        yield _params(
            14,
            f"RetinaNet on MF-{variant} params, backbone excluded",
            params,
            counts.params,
            counts.params,
            f"{_ALL_PARAMS}, P6 from 256 channels",
        )


def _madds(table: int, name: str, printed: str, unit: str, counts: Counts) -> PaperCell:
    return _cell(table, name, printed, unit, counts.ext, counts.ext, "MAdds by EXT")


def _params(
    table: int, name: str, printed: str, count: int, all_params: int, rule: str = _ALL_PARAMS
) -> PaperCell:
    return _cell(table, name, printed, "M", count, all_params, rule)


def _cell(
    table: int, name: str, printed: str, unit: str, count: int, one_rule: int, rule: str
) -> PaperCell:
    decimals = len(printed.partition(".")[2])

    def agrees(value: int) -> bool:
        return f"{value / _SCALES[unit]:.{decimals}f}" == printed

    return PaperCell(
        table=table,
        cell=name,
        unit=unit,
        paper=float(printed) if decimals else int(printed),
        ours=count / _SCALES[unit],
        match=agrees(count),
        rule=rule,
        match_one_rule=agrees(one_rule),
    )
