# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What docs/interop.md shows runs, and names what exists."""

import re
from pathlib import Path

import timm

from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS
from qbheat_det.modeling.classification import TIMM_NAMES

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "interop.md").read_text(encoding="utf-8")


def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "docs/interop.md", "exec"), {})


def test_the_table_has_the_widths_of_all_sizes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \| ([\d, ]+) \| (\d+) \|$", TEXT, flags=re.MULTILINE)
    assert {size: name for name, size, _, _ in rows} == TIMM_NAMES
    for _, size, widths, num_features in rows:
        arch = MOBILE_FORMER_ARCHS[size]
        *maps, _, _ = arch.output_shapes().values()
        assert widths == ", ".join(str(shape.channels) for shape in maps)
        assert int(num_features) == arch.expanded + arch.token_dim
    assert {name for name, *_ in rows} <= set(timm.list_models("mobile_former*"))
