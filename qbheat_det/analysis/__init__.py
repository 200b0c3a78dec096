# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a model costs and what it has learned."""

from .complexity import CountingRule, MAdds, count_detector_madds, count_madds, count_parameters

__all__ = ["CountingRule", "MAdds", "count_detector_madds", "count_madds", "count_parameters"]
