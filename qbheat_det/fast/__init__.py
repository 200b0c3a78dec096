# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fast forms of layers, for training or for inference.

``layers`` and ``modeling`` compute what the papers write. A fast form is a subclass of such a layer
that gives the same results, up to rounding, in less time. ``optimize`` replaces the layers of a
model by the fast forms for training or for prediction. A form is kept only if it saves at least
10 % of the time of a job that users run (docs/performance.md). Exported files use no fast forms,
because runtimes optimize the plain graph.
"""

from .folding import fold_batch_norms
from .forms import FORMS, Form, count_fast_layers, optimize

__all__ = ["FORMS", "Form", "count_fast_layers", "fold_batch_norms", "optimize"]
