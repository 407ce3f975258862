"""Ways to run a model in plaintext: torch eager, torch.compile and Torch-TensorRT; ONNX Runtime stands in onnx_engine.py.

`load` raises UsageError with the reason where an engine cannot be had here; every other error is a fault.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UsageError
from .subject import Built

EAGER, COMPILED, ONNX, TENSORRT = "torch eager", "torch.compile", "onnxruntime", "torch-tensorrt"
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""int8 is none of these: what it covers is stated beside it."""

MOST_TEXT = 300


class Engine(Protocol):
    """One model, ready to run. model_bytes: of its weights as this engine holds them. quantized: what int8 covers."""

    model_bytes: int
    quantized: str | None

    def set_threads(self, count: int) -> None: ...

    def inputs(self, tensors: Sequence[Tensor]) -> Any:
        """The form, type and place in which `run` takes them; made before the clock starts."""

    def run(self, inputs: Any) -> Any:
        """The model's call, and nothing else. Ends when its outputs are there."""

    def outputs(self, found: Any) -> list[Tensor]:
        """What `run` gave as a flat list of float32 tensors on the CPU, in the order of the model's structure."""


def engines(device: str = "cpu") -> list[tuple[str, str]]:
    """All (engine, dtype) that are tried on a device."""
    if torch.device(device).type == "cpu":
        return [(engine, dtype) for engine in (EAGER, COMPILED, ONNX) for dtype in ("fp32", "bf16", "int8")]
    dtypes = ("fp32", "bf16", "fp16", "int8")
    found = [(engine, dtype) for engine in (EAGER, COMPILED, ONNX) for dtype in dtypes]
    return [*found, (TENSORRT, "fp32"), (TENSORRT, "fp16")]


def load(engine: str, dtype: str, built: Built, device: str, folder: Path) -> Engine:
    """An engine that has given its first output. folder: private, for what it writes.

    Raises UsageError with the reason where the engine is not there or cannot run this model in this type on this device.
    """
    if engine not in (EAGER, COMPILED, ONNX, TENSORRT) or dtype not in (*DTYPES, "int8"):
        raise UsageError(f"there is no plaintext engine {engine} in {dtype}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device here")
    if engine == ONNX:
        from .onnx_engine import OnnxEngine

        return OnnxEngine(dtype, built, where, folder)
    return TorchEngine(engine, dtype, built, where)


class TorchEngine:
    """torch, eager or through one of torch.compile's backends, with its defaults."""

    def __init__(self, engine: str, dtype: str, built: Built, device: torch.device) -> None:
        self.quantized: str | None = None
        self._device = device
        self._dtype = DTYPES.get(dtype, torch.float32)
        if engine != EAGER:
            check_compiler(engine, device)
        module = copy.deepcopy(built.module).to(device)
        if dtype == "int8":
            module, self.quantized = quantized(module, device, compiled=engine != EAGER)
        elif self._dtype is not torch.float32:
            check_supported(self._dtype, device)
            module = module.to(self._dtype)
            check_computes_in(self._dtype, module, self.inputs(built.examples))
        self.model_bytes = tensor_bytes(module.state_dict())
        self._module = module if engine == EAGER else compiled(engine, module)
        try:
            with torch.inference_mode():
                self.run(self.inputs(built.examples))
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UsageError(f"{engine} cannot take this model: {brief(error)}") from error

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)  # torch.compile guards on it, and compiles once for each count

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.to(self._device, self._dtype if t.is_floating_point() else t.dtype) for t in tensors)

    def run(self, inputs: tuple[Tensor, ...]) -> Any:
        found = self._module(*inputs)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return found

    def outputs(self, found: Any) -> list[Tensor]:
        return flat(found)


def flat(found: Any) -> list[Tensor]:
    """Every tensor of a model's output structure, float32, on the CPU."""
    return [leaf.detach().float().cpu() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


# torch.compile


def check_compiler(engine: str, device: torch.device) -> None:
    """Raises UsageError where what an engine compiles with is not here."""
    if engine == TENSORRT:
        if device.type != "cuda":
            raise UsageError("Torch-TensorRT runs on CUDA devices alone")
        if find_spec("torch_tensorrt") is None:
            raise UsageError("torch_tensorrt is not installed")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UsageError(f"torch.compile needs a C++ compiler, and there is none: {brief(error)}") from None


def compiled(engine: str, module: nn.Module) -> Any:
    if engine == TENSORRT:
        import torch_tensorrt  # type: ignore[import-not-found]  # noqa: F401  (registers its backend)

        return torch.compile(module, backend="tensorrt", dynamic=False)
    return torch.compile(module, dynamic=False)


# Half precision: whether it is one.


def check_supported(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError where the processor would compute in another type and convert: that is no baseline of this one."""
    if dtype is not torch.bfloat16:
        return
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError(f"{torch.cuda.get_device_name(device)} has no bf16 arithmetic")
    elif not cpu_has_bf16():
        raise UsageError(
            "this processor has no bf16 instructions, and torch would compute in fp32 and convert"
        )


def cpu_has_bf16() -> bool:
    if torch.backends.cpu.get_cpu_capability().startswith(("AVX", "DEFAULT", "NO AVX")):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products and convolutions by the type that they compute in."""

    NAMES = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "conv", "attention", "einsum", "addbmm")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if any(known in name for known in self.NAMES):
            floats = [t.dtype for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_floating_point()]
            self.found.update(set(floats[:2]))
        return func(*args, **(kwargs or {}))


def check_computes_in(dtype: torch.dtype, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Run once. Raises UsageError where a product is computed in another type, as a model that casts for itself does."""
    try:
        with torch.inference_mode(), Products() as products:
            module(*inputs)
    except RuntimeError as error:
        raise UsageError(f"this model does not run in {name_of(dtype)}: {brief(error)}") from error
    others = {t: n for t, n in products.found.items() if t is not dtype}
    if others:
        rest = ", ".join(f"{n} in {name_of(t)}" for t, n in others.items())
        raise UsageError(f"not all products of this model are computed in {name_of(dtype)}: {rest}")


def name_of(dtype: torch.dtype) -> str:
    return next((name for name, t in DTYPES.items() if t is dtype), str(dtype).removeprefix("torch."))


# int8


def quantized(module: nn.Module, device: torch.device, *, compiled: bool) -> tuple[nn.Module, str]:
    """(the model with int8 weights and products where torch can, what that covers). Activations: scaled as they come.

    torch's own quantize_dynamic, where this torch still has it; torchao where it is installed and the model is compiled,
    which it is made for, or where torch's own has no kernels. Raises UsageError where neither is there, or nothing is
    covered.
    """
    own = device.type == "cpu" and find_spec("torch.ao.quantization.quantize") is not None
    ao = find_spec("torchao") is not None
    if not own and not ao:
        raise UsageError(
            f"torch has no int8 linear layers of its own on {device.type}, and torchao is not installed: "
            "pip install 'secureinfer[quant]'"
        )
    weighted = {name: type(m).__name__ for name, m in module.named_modules() if has_matrix(m)}
    if ao and (compiled or not own):
        from torchao.quantization import (  # type: ignore[import-not-found,unused-ignore]
            Int8DynamicActivationInt8WeightConfig,
            quantize_,
        )

        quantize_(module, Int8DynamicActivationInt8WeightConfig())
        tool = "torchao"
    else:
        with ignored("torch.ao.quantization is deprecated", "torch.quantize_per_tensor"):
            module = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
        tool = "quantize_dynamic"
    after = dict(module.named_modules())
    return module, coverage(weighted, {name for name in weighted if is_quantized(after[name])}, tool)


def has_matrix(module: nn.Module) -> bool:
    return any(p.dim() > 1 for p in module.parameters(recurse=False))


def is_quantized(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    homes = (type(module).__module__, type(weight).__module__)
    return homes[0].startswith("torch.ao.nn.quantized") or homes[1].startswith("torchao.")


def coverage(kinds: Mapping[str, str], covered: set[str], tool: str) -> str:
    """ "4 of 4 Linear; 0 of 20 Conv2d (by quantize_dynamic)". kinds: what each thing that has weights is.

    Raises UsageError where nothing is covered: such an int8 would be fp32 under another name.
    """
    total, done = Counter(kinds.values()), Counter(kinds[name] for name in covered)
    text = (
        "; ".join(f"{done[kind]} of {count} {kind}" for kind, count in total.items())
        or "0 layers with weights"
    )
    if not covered:
        raise UsageError(f"int8 covers nothing of this model: {text} (by {tool})")
    return f"{text} (by {tool})"


# Small parts


def tensor_bytes(state: Any) -> int:
    """Of all tensors in a state dict, what quantised layers pack included."""
    if isinstance(state, Mapping):
        return sum(tensor_bytes(part) for part in state.values())
    if isinstance(state, tuple | list):
        return sum(tensor_bytes(part) for part in state)
    if not isinstance(state, Tensor):
        return 0
    if hasattr(state, "__tensor_flatten__"):  # torchao: its parts, and not the type that it stands for
        return sum(tensor_bytes(getattr(state, name)) for name in state.__tensor_flatten__()[0])
    return state.numel() * state.element_size()


@contextmanager
def ignored(*starts: str) -> Iterator[None]:
    """Silence torch's warnings that start so: they are about its own future, and no reader of ours can act on them."""
    with warnings.catch_warnings():
        for start in starts:
            warnings.filterwarnings("ignore", message=rf"\s*{start}")
        yield


def brief(error: BaseException) -> str:
    """An error's first line that says something, without the line breaks and paths of a trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return "".join(c for c in text if c.isprintable())[:MOST_TEXT]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
