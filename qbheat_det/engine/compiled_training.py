# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``SOLVER.COMPILE``: the blocks of a model compiled for training, where there is a compiler.

Compiled by block, since equal blocks then share what is compiled, and since what lies between them
(matching, masks, losses) is better left as it is.
"""

import functools
import logging

from torch import nn
from torch._dynamo import config as dynamo_config

from qbheat_det.deployment.compiled_call import CompiledCall, find_fault
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
