# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``SOLVER.COMPILE``: the blocks of a model compiled for training, where there is a compiler.

Compiled by block, since equal blocks then share what is compiled, and since what lies between them
(matching, masks, losses) is better left as it is.
"""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException

from qbheat_det.modeling.contracts import FixedSizeModel

from .training_blocks import call_of, find_blocks

logger = logging.getLogger(__name__)
_GRAPHS_A_BLOCK = 8  # with and without padding, with and without gradients, for one image or more


def compile_blocks(model: nn.Module) -> int:
    """Makes the blocks of a model run compiled in training; says so, or why not.

    Images of one size compile to code for that size; where sizes differ, code serves all of them.

    Args:
        model: on its device.

    Returns:
        How many blocks will be compiled, when they are called; 0 where nothing can be.
    """
    device = next(model.parameters()).device
    fault = find_fault(device)
    if fault:
        logger.warning("SOLVER.COMPILE has no effect, blocks run as without it: %s", fault)
        return 0
    blocks = find_blocks(model)
    # All blocks share the entry that they are called through, for which PyTorch allows few graphs.
    graphs = _GRAPHS_A_BLOCK * len(blocks)
    dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, graphs)
    total = dynamo_config.accumulated_cache_size_limit
    dynamo_config.accumulated_cache_size_limit = max(total, graphs)
    dynamic = not isinstance(model, FixedSizeModel)
    for name, block in blocks.items():
        call_of(block).compiled = CompiledCall(
            block._call_impl, functools.partial(_tell_that_it_runs_as_it_is, name), dynamic=dynamic
        )
    logger.info(
        "%d blocks are compiled when they are first met, which takes minutes; PyTorch keeps what "
        "it compiled for later starts", len(blocks),
    )  # fmt: skip
    return len(blocks)


def _tell_that_it_runs_as_it_is(name: str, reason: str) -> None:
    logger.warning("block '%s' runs as it is, PyTorch cannot compile it: %s", name, reason)


class CompiledCall:
    """A function that is compiled when it is first called, or runs as it is if that fails.

    Attributes:
        has_failed: whether it runs as it is from now on.
    """

    def __init__(
        self, function: Callable[..., Any], give_up: Callable[[str], None], **options: Any
    ) -> None:
        """
        Args:
            function: what is compiled; of its copies a copy.
            give_up: takes what PyTorch says, once, where it cannot compile the function.
            options: for ``torch.compile``.
        """
        self._function = function
        self._give_up = give_up
        self._options = options
        self.has_failed = False
        self._call: Callable[..., Any] = torch.compile(function, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledCall":
        # What is compiled holds on to the original's weights.
        function, give_up = copy.deepcopy((self._function, self._give_up), memo)
        return CompiledCall(function, give_up, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        try:
            return self._call(*args, **kwargs)
        except TorchDynamoException as error:
            if self.has_failed:
                raise
            lines = str(error).strip().splitlines()
            self._give_up(lines[0] if lines else type(error).__name__)
            self._call, self.has_failed = self._function, True
        return self._function(*args, **kwargs)


def find_fault(device: torch.device) -> str:
    """Compiles one line, forward and backward, and returns what hinders it; "" where it works."""
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
            x = torch.ones(64, device=device, requires_grad=True)
            torch.compile(_one_line)(x).sum().backward()
    except Exception as error:  # of the compiler, of PyTorch, of Triton, each with its own
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _one_line(x: Tensor) -> Tensor:
    return (2 * x).relu()
