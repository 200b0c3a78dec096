# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds the convolutions whose output is read by a BatchNorm and by nothing else."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class NormInputs:
    """Watches a forward pass of a network, with gradients.

    Use it as a context manager around the forward pass, and call ``find`` with its results.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._hooks: list[Any] = []
        # Name and node in the graph of autograd, of each call.
        self._conv_outputs: list[tuple[str, Any]] = []
        self._norm_inputs: list[tuple[str, Any]] = []

    def __enter__(self) -> "NormInputs":
        for name, module in self._net.named_modules():
            if isinstance(module, nn.Conv2d):
                hook = module.register_forward_hook(partial(self._note_conv, name))
                self._hooks.append(hook)
            elif isinstance(module, _BatchNorm):
                hook = module.register_forward_pre_hook(partial(self._note_norm, name))
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note_conv(self, name: str, conv: nn.Module, inputs: Any, output: Tensor) -> None:
        self._conv_outputs.append((name, output.grad_fn))

    def _note_norm(self, name: str, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        self._norm_inputs.append((name, inputs[0].grad_fn))

    def find(self, outputs: Iterable[Tensor]) -> dict[str, str]:
        """Returns the names of convolutions by the names of the norms.

        Convolutions and norms that ran more than once are left out. ``outputs`` are the results of
        the forward pass.
        """
        num_readers = _count_readers(outputs)
        num_runs = Counter(name for name, _ in (*self._conv_outputs, *self._norm_inputs))
        conv_names = {node: name for name, node in self._conv_outputs}
        pairs = {}
        for norm_name, node in self._norm_inputs:
            conv_name = conv_names.get(node)
            if conv_name is None or num_readers[node] > 1:
                continue
            if num_runs[conv_name] == 1 and num_runs[norm_name] == 1:
                pairs[norm_name] = conv_name
        return pairs


def _count_readers(outputs: Iterable[Tensor]) -> Counter[Any]:
    """Returns how many nodes of autograd's graph, and ``outputs``, read the result of each node."""
    num_readers: Counter[Any] = Counter(output.grad_fn for output in outputs)
    nodes = list(num_readers)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None:
                continue
            if node not in num_readers:
                nodes.append(node)
            num_readers[node] += 1
    return num_readers
