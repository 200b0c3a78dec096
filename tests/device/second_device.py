# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A device ``second`` in the CPU's memory, for tests: it refuses what a CUDA device refuses.

It is PyTorch's PrivateUse1 device with kernels in Python. Each operator runs on the CPU, on tensors
that share the memory. An operator raises if its tensors are on both devices. What makes the host
wait for a CUDA device (see ``torch.cuda.set_sync_debug_mode``) is recorded with its place.
"""

import contextlib
import ctypes
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import backend_registration

import qbheat_det
import tests

NAME = "second"
_PACKAGE, *_NOT_NAMED = (
    f"{Path(module.__file__).parent}/" for module in (qbheat_det, torch, contextlib, tests)
)
_EXTENSION, _CPU = 12, 1  # DLPack's types of device
_ATEN = torch.ops.aten
_KERNELS = torch.library.Library("aten", "IMPL")
_FALLBACKS = torch.library.Library("_", "IMPL")
# The host waits for the size or the value of their results.
_WAITS = """
_local_scalar_dense nonzero masked_select equal _unique2 unique_dim unique_consecutive bincount
repeat_interleave nms"""
# What CUDA's autocast runs in half precision, and in float32.
_HALF = """
linear matmul mm bmm addmm baddbmm conv2d conv_transpose2d.input scaled_dot_product_attention"""
_FLOAT = """
softmax.int log_softmax.int exp log log1p pow.Tensor_Scalar rsqrt reciprocal layer_norm group_norm
norm.ScalarOpt_dim cosine_similarity nll_loss smooth_l1_loss mse_loss l1_loss kl_div
binary_cross_entropy_with_logits cross_entropy_loss prod sum sum.dim_IntList cumsum cdist"""

_waits = None


class _Module(backend_registration._DummyBackendModule):
    """What PyTorch asks ``torch.second``."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


class Generator(torch.Generator):
    """The CPU's in place of the second device's, which Python cannot make."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


def install():
    """Registers the device, before the first backward pass of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    _FALLBACKS.fallback(_fallback, "PrivateUse1")
    _FALLBACKS.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in {
        "as_strided": _as_strided,
        "_reshape_alias": _as_strided,
        "view": _view,
        "copy_": _copy,
        "convolution_overrideable": _convolve,
        "convolution_backward_overrideable": _convolve_backward,
        "_fused_sdp_choice": lambda *args, **kwargs: 0,  # composed of other operators
    }.items():
        _KERNELS.impl(name, kernel, "PrivateUse1")
    for names, is_half in ((_HALF, True), (_FLOAT, False)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(_ATEN, packet), overload or "default")
            _KERNELS.impl(name, _autocast(operator, is_half), "AutocastPrivateUse1")
    for kind, name, own in (
        (Tensor, "__deepcopy__", _deepcopy),
        (torch.UntypedStorage, "cpu", _storage_on_cpu),
    ):
        setattr(kind, name, _of_second(own, getattr(kind, name)))


@contextlib.contextmanager
def recorded_waits():
    """Yields the places "file function" of the package where the host waits meanwhile.

    The module and function of a library that waits follow, for example Detectron2's.
    """
    global _waits
    before, _waits = _waits, set()
    try:
        yield _waits
    finally:
        _waits = before


def _note():
    if _waits is None:
        return
    frame, library = sys._getframe(), ""
    while frame and not (file := frame.f_code.co_filename).startswith(_PACKAGE):
        if not (library or file.startswith(tuple(_NOT_NAMED))):
            library = f", {Path(file).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    # The threads of a backward pass have no frames of the package.
    where = f"{file.removeprefix(_PACKAGE)} {frame.f_code.co_qualname}" if frame else "backward"
    _waits.add(where.replace(".<locals>.<listcomp>", "") + library)


def _retyped(tensor, device_type):
    """Returns a tensor on another device that shares the memory, and keeps it alive."""
    capsule = torch._C._to_dlpack(tensor)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    after_data = get_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(after_data).value = device_type
    return torch._C._from_dlpack(capsule)


def _is_second(value):
    return isinstance(value, Tensor) and value.device.type == NAME


def _map(change, value):
    """Changes a tensor, or those of a list, a tuple or a dict; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_map(change, part) for part in value])
    if isinstance(value, dict):
        return {name: _map(change, part) for name, part in value.items()}
    return value


def _on_cpu(x):
    return _retyped(x, _CPU) if _is_second(x) else x


def _on_second(x):
    return _retyped(x, _EXTENSION)


def _check_devices(op, *values):
    found = []
    _map(lambda x: found.append(x) or x, values)
    if len({x.device.type for x in found if x.dim()}) > 1:  # CUDA takes the CPU's numbers
        tensors = ", ".join(f"{tuple(x.shape)} on {x.device.type}" for x in found)
        raise RuntimeError(f"{op}: expected all tensors on the same device, but found {tensors}")


def _fallback(op, *args, **kwargs):
    """Runs an operator on the CPU, if CUDA would run it."""
    arguments, name = op._schema.arguments, op._schema.name.partition("::")[2]
    if "index" in name and isinstance(args[1], list | tuple):  # indices may be on the CPU
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool or not _is_second(index) for index in indices):
            _note()
        _check_devices(op, args[0], args[2:])
    else:
        _check_devices(op, args, kwargs)
    if name in _WAITS.split():
        _note()
    own, named = _map(_on_cpu, list(args)), _map(_on_cpu, kwargs)
    for i, value in enumerate(own):  # numbers that were tensors
        if isinstance(value, int | float) and isinstance(arguments[i].type, torch.TensorType):
            own[i] = torch.tensor(value)
    if "device" in named:
        named["device"] = torch.device("cpu")
    out = kwargs.get("out")
    if grows := out is not None and not out.numel():  # as of arange, which finds the size
        named["out"] = torch.empty(0, dtype=out.dtype)
    results = op(*own, **named)
    if grows:
        out.data = _on_second(results)
    elif out is not None and out.shape != named["out"].shape:  # as of a mean of squares
        out.as_strided_(named["out"].shape, named["out"].stride())
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = [given[x.name] for x in arguments if x.alias_info and x.alias_info.is_write]
    returns = op._schema.returns
    if written and returns and all(value.alias_info for value in returns):
        return written[0] if len(returns) == 1 else tuple(written)
    return _map(_on_second, results)


def _as_strided(x, size, stride, offset=None):
    return _ATEN.alias(x).as_strided_(size, stride, offset)


def _view(x, size):
    there = torch.empty_strided(x.shape, x.stride(), device="meta").view(size)
    return _as_strided(x, there.shape, there.stride(), x.storage_offset())


def _copy(target, source, non_blocking=False):
    # To the CPU, a copy is asynchronous into pinned memory alone, which this device has not.
    if target.device != source.device and not (non_blocking and _is_second(target)):
        _note()
    _on_cpu(target).copy_(_on_cpu(source))
    return target


def _convolve(*args):
    return _fallback(_ATEN.convolution.default, *args)


def _convolve_backward(gradient, x, weight, *args):
    backward = _ATEN.convolution_backward.default
    return _fallback(backward, gradient, x, weight, [len(weight)], *args)


def _autocast(operator, is_half):
    def cast(x):
        if not _is_second(x) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return x
        return x.to(torch.get_autocast_dtype(NAME) if is_half else torch.float32)

    def run(*args, **kwargs):
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*_map(cast, args), **_map(cast, kwargs))

    return run


def _of_second(own, method):
    return lambda self, *args: (own if self.device.type == NAME else method)(self, *args)


def _deepcopy(tensor, memo):
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _storage_on_cpu(storage):
    values = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(values, dtype=torch.uint8).clone().untyped_storage()
