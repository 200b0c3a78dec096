# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What ``deploy`` returns: a model for prediction alone."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import masks_padding

from .compiling import find_parts
from .precision import return_float32
from .report import DeployReport


class DeployedModel(nn.Module):
    """A copy of a model that only predicts, called as the original is.

    ``copy.deepcopy`` and pickle give a copy that is not compiled.

    Attributes:
        model: the folded, fused and perhaps compiled copy, of the original's class.
        report: the steps of ``deploy``, and whether each applied.
        compiled_sizes: (height, width) in pixels of the images that a CPU's code is for.
        dtype: of the backbone's and the heads' arithmetic.
        has_cuda_graphs: whether results are overwritten by the next call.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, report: DeployReport) -> None:
        """
        Args:
            model: in evaluation mode, without gradients.
            dtype: of the backbone's and the heads' arithmetic; results are float32.
            report: see above.
        """
        super().__init__()
        self.model = model
        self.report = report
        self.compiled_sizes: frozenset[tuple[int, int]] = frozenset()
        self.has_cuda_graphs = False
        self._masks_padding = masks_padding(model)
        self.dtype = dtype
        if dtype != torch.float32:
            return_float32(find_parts(model).values())
        self.eval()

    def forward(self, inputs: Any) -> Any:
        """As the original's: a list of dicts with "image" (3, H, W), or a backbone's (N, 3, H, W).

        Autocast of the caller's has no effect, nor has inference mode.
        """
        device_type = next(self.model.parameters()).device.type
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device_type, self.dtype, enabled=self.dtype != torch.float32),
        ):
            if isinstance(inputs, Tensor):
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            elif self._runs_images_alone(inputs):
                return [self._run([entry])[0] for entry in inputs]
            return self._run(inputs)

    def train(self, mode: bool = True) -> "DeployedModel":
        """Stays in evaluation mode.

        Raises:
            UserError: ``mode`` is True.
        """
        if mode:
            raise UserError("a deployed model does not train: train the original, and deploy that")
        return super().train(False)

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Not possible, since weights are folded and compiled.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a deployed model takes no other weights: load them into the original, and deploy that"
        )

    def _runs_images_alone(self, inputs: list[dict[str, Any]]) -> bool:
        """Whether a batch gives the same, and sooner, as images one by one."""
        sizes = {(entry["image"].shape[-2], entry["image"].shape[-1]) for entry in inputs}
        return self._masks_padding if len(sizes) > 1 else sizes <= self.compiled_sizes

    def _run(self, inputs: Any) -> Any:
        if self.has_cuda_graphs:  # the results of the last call have been read
            torch.compiler.cudagraph_mark_step_begin()
        return self.model(inputs)
