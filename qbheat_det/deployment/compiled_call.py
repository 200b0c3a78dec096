# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``torch.compile`` where it works, and the function itself where it does not."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException


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
