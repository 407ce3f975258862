"""A model in ONNX Runtime: exported, checked against torch, converted or quantised, and counted as the session runs it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .engines import DTYPES, brief, coverage, flat, ignored
from .subject import Batches, Built

OPSET, HALF_OPSET = 18, 22
"""The exporter's, and the first in which convolutions take bf16."""
MOST_CALIBRATION = 64
MOST_DIFFERENCE = 1e-3
"""Of an export in fp32, of the greatest output: it is another model then, as where a trace took one way of two."""

SECOND_FACTOR = {
    "Conv": 1, "FusedConv": 1, "NhwcFusedConv": 1, "ConvInteger": 1, "QLinearConv": 3,
    "MatMul": 1, "FusedMatMul": 1, "Gemm": 1, "FusedGemm": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1, "QLinearMatMul": 3, "QGemm": 3,
}  # fmt: skip
"""Products, in ONNX's domain and in ONNX Runtime's own, and where the second factor stands among their inputs."""
INT8 = {
    "ConvInteger", "QLinearConv", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm",
}  # fmt: skip


class Flat(nn.Module):
    """A model whose answer is a flat tuple, which is what ONNX can say."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            leaf for leaf in torch.utils._pytree.tree_leaves(self.model(*inputs)) if isinstance(leaf, Tensor)
        )


@dataclass(frozen=True)
class Bound:
    """Inputs and outputs in place for a session: a small model is slower when they are handed to it. values: kept alive."""

    binding: Any
    values: list[Any]


class OnnxEngine:
    """One session for each number of threads, made when that is chosen."""

    def __init__(self, dtype: str, built: Built, device: torch.device, folder: Path) -> None:
        missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
        if missing:
            raise UsageError(f"{' and '.join(missing)} not installed: pip install 'secureinfer[bench]'")
        self._provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        self._place = (device.type, device.index or 0)
        self._folder = folder
        self.quantized: str | None = None
        self._model = folder / "fp32.onnx"
        export(built, self._model)
        self._start(1)
        self._check(built)
        if dtype == "int8":
            self._model, tool = quantize(self._model, folder, built.calibration)
            self._start(1)
            self.quantized = covered(folder / "fp32.onnx", self._as_it_runs, tool)
        elif dtype != "fp32":
            self._model = in_half(self._model, folder / f"{dtype}.onnx", dtype)
            self._start(1)
            check_half(self._as_it_runs, dtype)
        self.model_bytes = self._model.stat().st_size

    @property
    def _as_it_runs(self) -> Path:
        return self._folder / "as_it_runs.onnx"

    def _start(self, threads: int) -> None:
        import onnxruntime  # type: ignore[import-untyped]

        # Otherwise a session would keep threads spinning after its run, beside whatever runs next.
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what stops it is raised
        options.optimized_model_filepath = str(self._as_it_runs)
        there = onnxruntime.get_available_providers()
        if self._provider not in there:
            raise UsageError(f"this ONNX Runtime has {', '.join(there)}, and not {self._provider}")
        try:
            self._session = onnxruntime.InferenceSession(
                str(self._model), options, providers=[self._provider]
            )
        except Exception as error:  # its exceptions share no base of their own
            raise UsageError(f"ONNX Runtime takes no session of this model: {brief(error)}") from None
        if self._provider not in self._session.get_providers():
            raise UsageError(f"ONNX Runtime could not use {self._provider} and fell back")
        self._names = [i.name for i in self._session.get_inputs()]

    def _check(self, built: Built) -> None:
        for inputs in built.calibration[:4]:
            with torch.inference_mode():
                expected = flat(built.module(*inputs))
            found = self.outputs(self.run(self.inputs(inputs)))
            for a, b in zip(found, expected, strict=True):
                if not b.isfinite().all():
                    continue
                worst, most = float((a - b).abs().max()), MOST_DIFFERENCE * max(1.0, float(b.abs().max()))
                if not worst <= most:
                    raise UsageError(
                        f"its export to ONNX computes something else: off by {worst:.3g} on calibration inputs"
                    )

    def set_threads(self, count: int) -> None:
        self._start(count)

    def inputs(self, tensors: Sequence[Tensor]) -> Bound:
        """float32 where the caller has it: a graph in half precision begins with a cast."""
        import onnxruntime

        # A trace leaves out inputs that the model does not use.
        known = {f"input_{i}": t for i, t in enumerate(tensors)}
        binding = self._session.io_binding()
        values = []
        for name in self._names:
            array = known[name].contiguous().numpy()
            values.append(onnxruntime.OrtValue.ortvalue_from_numpy(array, *self._place))
            binding.bind_ortvalue_input(name, values[-1])
        for output in self._session.get_outputs():
            binding.bind_output(output.name, *self._place)
        return Bound(binding, values)

    def run(self, inputs: Bound) -> Any:
        self._session.run_with_iobinding(inputs.binding)
        if self._place[0] != "cpu":
            inputs.binding.synchronize_outputs()
        return inputs.binding

    def outputs(self, found: Any) -> list[Tensor]:
        # Its arrays are views of memory that goes with the binding.
        return [torch.from_numpy(value.numpy()).to(torch.float32, copy=True) for value in found.get_outputs()]


def export(built: Built, path: Path) -> None:
    """The model as ONNX, by a trace of its public examples. Raises UsageError with the exporter's reason."""
    names = [f"input_{i}" for i in range(len(built.examples))]
    # The exporter leaves a model in the mode in which it found the whole: the wrapper's must not be training.
    model = Flat(built.module).eval()
    try:
        # The default exporter needs onnxscript. A trace that took one of two ways is caught by OnnxEngine._check.
        with ignored("You are using the legacy", "The feature will be removed", "Exporting aten::index"):
            warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
            torch.onnx.export(
                model,
                built.examples,
                str(path),
                input_names=names,
                opset_version=OPSET,
                dynamo=False,
            )
    except Exception as error:
        raise UsageError(f"this model cannot be exported to ONNX: {brief(error)}") from error


# Half precision


def in_half(model: Path, path: Path, dtype: str) -> Path:
    """The same graph with every float of it in bf16 or fp16, between a cast of its inputs and one of its outputs."""
    import onnx
    from onnx import helper, numpy_helper, version_converter

    single = onnx.TensorProto.FLOAT
    half = onnx.TensorProto.BFLOAT16 if dtype == "bf16" else onnx.TensorProto.FLOAT16
    proto = version_converter.convert_version(onnx.load(str(model)), HALF_OPSET)
    graph = proto.graph

    def convert(tensor: Any) -> None:
        if tensor.data_type == single:
            values = numpy_helper.to_array(tensor)
            # A mask's -3.4e38 becomes -inf in fp16, and a row of them not a number: the greatest finite number stays.
            most = torch.finfo(DTYPES[dtype]).max
            tensor.CopyFrom(
                helper.make_tensor(tensor.name, half, values.shape, values.clip(-most, most).ravel())
            )

    for tensor in graph.initializer:
        convert(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == single:
                attribute.i = half
            if attribute.HasField("t"):
                convert(attribute.t)
    del graph.value_info[:]
    floats = {i.name for i in graph.input if i.type.tensor_type.elem_type == single}
    results = {o.name for o in graph.output if o.type.tensor_type.elem_type == single}
    for node in graph.node:
        for names, renamed in ((node.input, floats | results), (node.output, results)):
            for i, name in enumerate(names):
                names[i] = f"{name}_half" if name in renamed else name
    before = [helper.make_node("Cast", [name], [f"{name}_half"], to=half) for name in sorted(floats)]
    after = [helper.make_node("Cast", [f"{name}_half"], [name], to=single) for name in sorted(results)]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(proto, str(path))
    return path


def check_half(as_it_runs: Path, dtype: str) -> None:
    """Raises UsageError where the session put casts around products, and computes them in fp32."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(onnx.load(str(as_it_runs))).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info)}
    types |= {t.name: t.data_type for t in graph.initializer}
    made_by_cast = {
        node.output[0]: a.i
        for node in graph.node
        if node.op_type == "Cast"
        for a in node.attribute
        if a.name == "to"
    }
    types |= made_by_cast
    products = [node for node in graph.node if node.op_type in SECOND_FACTOR]
    single = [n for n in products if onnx.TensorProto.FLOAT in [types.get(i) for i in n.input[:2]]]
    if single:
        raise UsageError(
            f"ONNX Runtime computes {len(single)} of {len(products)} products in fp32, not in {dtype}"
        )


# int8


def quantize(model: Path, folder: Path, calibration: Batches) -> tuple[Path, str]:
    """(the model in int8, how). Convolutions need scales that stand before: static, from calibration inputs. Models of
    matrix products alone have them computed as activations come, which keeps more of a transformer's accuracy.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static  # type: ignore[import-untyped]
    from onnxruntime.quantization.shape_inference import quant_pre_process  # type: ignore[import-untyped]

    whole, path = folder / "whole.onnx", folder / "int8.onnx"
    try:
        quant_pre_process(str(model), str(whole), skip_symbolic_shape=True)
        # Without VNNI two products of 8 bits can overflow the 16 bits that their sum is kept in.
        common: dict[str, Any] = {
            "per_channel": True,
            "reduce_range": not torch.cpu._is_vnni_supported(),
            "weight_type": QuantType.QInt8,
        }
        if any(node.op_type == "Conv" for node in onnx.load(str(model)).graph.node):
            # With signed activations, the default, the session fuses half of a ResNet's convolutions, and none that SiLU
            # follows: they would run in fp32 between casts.
            reader = reader_of(calibration[:MOST_CALIBRATION], str(model))
            quantize_static(
                str(whole),
                str(path),
                reader,
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                **common,
            )
            return path, "static QDQ"
        quantize_dynamic(str(whole), str(path), op_types_to_quantize=["MatMul", "Gemm"], **common)
        return path, "dynamic"
    except Exception as error:
        raise UsageError(f"ONNX Runtime cannot quantise this model: {brief(error)}") from error


def reader_of(calibration: Batches, model: str) -> Any:
    """What quantize_static draws its calibration inputs from."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader

    names = [i.name for i in onnx.load(model, load_external_data=False).graph.input]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left: Iterator[dict[str, Any]] = iter(
                [{f"input_{i}": t.numpy() for i, t in enumerate(inputs)} for inputs in calibration]
            )

        def get_next(self) -> dict[str, Any] | None:
            found = next(self._left, None)
            return None if found is None else {name: found[name] for name in names}

    return Reader()


def covered(model: Path, as_it_runs: Path, tool: str) -> str:
    """What of the float graph's products the session computes in int8: counted in the graph that it runs, not in the one
    that the quantiser wrote. Raises UsageError where that is nothing.
    """
    kinds = products(model)
    after = products(as_it_runs, int8=True)
    names: set[str] = set()
    for kind in set(kinds.values()):
        mine = [name for name, k in kinds.items() if k == kind]
        names.update(mine[: sum(k == kind for k in after.values())])
    return coverage(kinds, names, f"{tool} quantisation of ONNX Runtime")


def products(path: Path, *, int8: bool = False) -> dict[str, str]:
    """node -> "Conv", "MatMul" (Gemm included) or "MatMul of activations", which has no weights. int8: those alone."""
    import onnx

    graph = onnx.load(str(path)).graph
    known = {t.name for t in graph.initializer} | {
        name for node in graph.node if node.op_type == "Constant" for name in node.output
    }
    found: dict[str, str] = {}
    for i, node in enumerate(graph.node):
        place = SECOND_FACTOR.get(node.op_type)
        if place is None or (int8 and node.op_type not in INT8):
            continue
        if "Conv" in node.op_type:
            kind = "Conv"
        else:
            kind = "MatMul" if node.input[place] in known else "MatMul of activations"
        found[f"{i}"] = kind
    return found
