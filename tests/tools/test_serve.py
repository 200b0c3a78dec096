# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Flags of ``qbheat serve``."""

import pytest

from tests.tool_modules import load_tool


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
def test_limits_are_finite_and_positive(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        load_tool("serve").parse_args(["--weights", "x", "--max-megabytes", value])
    assert "--max-megabytes" in capsys.readouterr().err
