"""Stacks the experts of a layer by projection, as models need them, from all layouts of files.

Files have one tensor for each expert and projection (``mlp.experts.7.gate_proj.weight``; Mixtral:
``block_sparse_moe.experts.7.w1.weight``), or stacks, in which gate and up may be fused (``mlp.experts.gate_up_proj``,
Transformers 5; Granite: ``block_sparse_moe.input_linear.weight``). Models have ``mlp.experts.gate_proj.weight``
[experts, out, in]. Only gpt-oss has stacks with biases; it interleaves the rows of gate and up, and stores matrices
transposed unless they are quantized.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from llmjax.checkpoint.rows import ColumnsOf, RowsOf
from llmjax.checkpoint.safetensors import SafetensorsTensor
from llmjax.checkpoint.stored_tensor import Derived, StoredStack, StoredTensor
from llmjax.errors import CheckpointError
from llmjax.weights.memory import aligned_empty
from llmjax.weights.packing import RowSource, RowStack

logger = logging.getLogger(__name__)

ONE = re.compile(
    r"(?P<layer>.*)\.(?:(?:mlp|mixer|block_sparse_moe|feed_forward)\.|(?<=\d\.))experts\."
    r"(?P<expert>0|[1-9][0-9]{0,8})\.(?P<projection>\w+)\.weight"
)
STACK = re.compile(
    r"(?P<layer>.*)\.(?:(?:(?:mlp|mixer|block_sparse_moe|feed_forward)\.|(?<=\d\.))experts\."
    r"(?P<projection>gate_proj|up_proj|down_proj|gate_up_proj)"
    r"|block_sparse_moe\.(?P<granite>input_linear|output_linear))(?:\.weight)?"
)
BIAS = re.compile(r"(?P<module>.*\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)_bias")
OTHER_ROUTER = re.compile(
    r"(?P<layer>.*)\.(?:block_sparse_moe|feed_forward)\.(?:gate\.|router\.(?:layer\.)?)?(?P<suffix>\w+)"
)
LLAMA4 = re.compile(r"(?P<layer>.*)\.feed_forward\.experts\.(?P<projection>gate_up_proj|down_proj)")
DBRX = re.compile(r"(?P<module>.*\.(?:ffn|mlp))\.experts\.mlp\.(?P<projection>w1|v1|w2)")
ROUTER = r"(?:mlp|block_sparse_moe|feed_forward)\.gate|shared_expert_gate|router(?:\.layer|\.proj)?"
"""Pattern of the modules that choose experts, at the end of a name."""
CORRECTIONS = MappingProxyType({"expert_bias": "e_score_correction_bias"})
"""LFM2's name for the correction of scores."""
MIXTRAL_PROJECTIONS = MappingProxyType({"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"})
"""Projections by Mixtral's names."""
GRANITE_PROJECTIONS = MappingProxyType({"input_linear": "gate_up_proj", "output_linear": "down_proj"})
"""Projections by Granite's names of stacks."""
DBRX_PROJECTIONS = MappingProxyType({"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"})
"""Projections by DBRX's names."""
UNGATED_PROJECTIONS = MappingProxyType({"w1": "up_proj", "w2": "down_proj", "v1": "gate_proj"})
"""Projections by the names of nomic-bert, whose experts have no gate."""
MIXTRAL_NAMES = MappingProxyType({projection: name for name, projection in MIXTRAL_PROJECTIONS.items()})


class ExpertStack(Derived):
    """A projection of all experts of a layer, made of their matrices, which have one shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.sources), *self.sources[0].shape)

    def row_source(self) -> RowStack | None:
        """Codes and scales of all experts; None, with a warning if any has them, if they have no common format.

        Raises:
            CheckpointError: as `read`.
        """
        sources: list[RowSource] = []
        for matrix in self.sources:
            source = matrix.row_source()
            if source is None:  # plain, or it has warned why it is dequantized
                if len({each.type_name for each in self.sources}) > 1 or sources:
                    self._warn(f"expert {len(sources)} has to be read as plain numbers")
                return None
            assert not isinstance(source, RowStack)
            if sources and source.format != sources[0].format:
                self._warn(f"experts 0 and {len(sources)} are stored in different formats")
                return None
            sources.append(source)
        return RowStack(len(sources), sources.__getitem__)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The values [experts, out, in], read expert by expert; see `StoredTensor.read`."""
        values = aligned_empty(self.shape, dtype)
        for expert, matrix in enumerate(self.sources):
            values[expert] = matrix.read(dtype)
        return values

    def read_some(self, experts: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """`read` for some experts, [their number, out, in]; zeros for a negative number."""
        values = aligned_empty((len(experts), *self.shape[1:]), dtype)
        for place, expert in enumerate(experts):
            values[place] = self.sources[expert].read(dtype) if expert >= 0 else 0
        return values

    def _warn(self, problem: str) -> None:
        logger.warning("tensor %r of type %s is dequantized: %s", self.name, self.type_name, problem)


def with_stacked_experts(
    tensors: Mapping[str, StoredStack], path: Path, *, interleaved: bool = False
) -> dict[str, StoredTensor]:
    """Tensors with stacked experts under the model's names.

    Args:
        tensors: tensors by Hugging Face name.
        path: the checkpoint, for messages.
        interleaved: whether rows of gate and up take turns in stacks, whatever is beside them.

    Raises:
        CheckpointError: an expert is missing or appears twice, experts differ in shape, or a stack has scales.
    """
    found: dict[str, StoredTensor] = {}
    single: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if one := ONE.fullmatch(name):
            projection = MIXTRAL_PROJECTIONS.get(one["projection"], one["projection"])
            single.setdefault(f"{one['layer']}.mlp.experts.{projection}.weight", {})[int(one["expert"])] = tensor
        elif router := OTHER_ROUTER.fullmatch(name):
            suffix = CORRECTIONS.get(router["suffix"], router["suffix"])
            found[f"{router['layer']}.mlp.gate.{suffix}"] = tensor
        elif (stack := LLAMA4.fullmatch(name)) and len(tensor.shape) == 3 and isinstance(tensor, SafetensorsTensor):
            _check_plain(tensor, tensors, path)
            for own in _cut_columns(tensor, f"{stack['layer']}.mlp.experts", stack["projection"], path):
                found[own.name] = own
        elif (stack := STACK.fullmatch(name)) and len(tensor.shape) == 3:
            _check_plain(tensor, tensors, path)
            projection = stack["projection"] or GRANITE_PROJECTIONS[stack["granite"]]
            cut = _cut_interleaved if interleaved or f"{name}_bias" in tensors else _cut
            for own in cut(tensor, f"{stack['layer']}.mlp.experts", projection, path):
                if own.name in found:
                    raise CheckpointError(f"{path}: tensor {own.name!r} is there twice, once in {tensor.name!r}")
                found[own.name] = own
        elif (stack := DBRX.fullmatch(name)) and len(tensor.shape) == 2 and isinstance(tensor, SafetensorsTensor):
            beside = tensors.get(f"{stack['module']}.router.layer.weight")
            gated = f"{stack['module']}.experts.mlp.v1" in tensors
            projection = DBRX_PROJECTIONS[stack["projection"]] if gated else UNGATED_PROJECTIONS[stack["projection"]]
            own = _cut_rows(tensor, f"{stack['module']}.experts", projection, beside, path)
            found[own.name] = own
        elif (bias := BIAS.fullmatch(name)) and len(tensor.shape) == 2:
            found |= {own.name: own for own in _cut_bias(tensor, bias["module"], bias["projection"])}
        else:
            found[name] = tensor
    for name, experts in single.items():
        if name in found:
            raise CheckpointError(f"{path}: tensor {name!r} is there twice, stacked and expert by expert")
        found[name] = _stack(name, experts, path)
    return found


def with_separate_experts(tensors: Mapping[str, StoredTensor], *, mixtral: bool) -> dict[str, StoredTensor]:
    """The inverse of `with_stacked_experts`: a tensor for each expert and projection, by published names.

    Args:
        mixtral: whether to use Mixtral's names.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, ExpertStack):
            for expert, matrix in enumerate(tensor.sources):
                found[expert_name(name, expert, mixtral=mixtral)] = matrix
        else:
            found[_mixtral_block(name) if mixtral else name] = tensor
    return found


def expert_name(stack: str, expert: int, *, mixtral: bool) -> str:
    """The published name of the matrix of one expert.

    Args:
        stack: the name of the stack in the model, ``….mlp.experts.up_proj.weight``.
        expert: index of the expert in the stack.
        mixtral: whether to use Mixtral's names.
    """
    module, _, projection = stack.removesuffix(".weight").rpartition(".")
    one = f"{module}.{expert}.{MIXTRAL_NAMES[projection] if mixtral else projection}.weight"
    return _mixtral_block(one) if mixtral else one


def _mixtral_block(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


def _check_plain(tensor: StoredStack, tensors: Mapping[str, StoredStack], path: Path) -> None:
    """Refuses 8-bit floats with scales beside them, since these are not plain numbers."""
    if isinstance(tensor, SafetensorsTensor) and tensor.type_name.startswith("F8_"):
        scale = next((name for name in tensors if name.startswith(f"{tensor.name}_scale")), None)
        if scale is not None:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} is a stack of type {tensor.type_name}, whose scales {scale!r} "
                "are not understood; experts one by one are"
            )


def _cut(tensor: StoredStack, module: str, projection: str, path: Path) -> Iterator[ExpertStack]:
    """The projections that a stack [experts, out, in] holds, one or two, gate first."""
    projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    experts, rows, _ = tensor.shape
    if 0 in tensor.shape:  # a file of any size could claim any number of empty experts
        raise CheckpointError(f"{path}: tensor {tensor.name!r} is empty: its shape is {list(tensor.shape)}")
    if rows % len(projections):
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has {rows} rows, not an even number for gate and up")
    each = rows // len(projections)
    for i, one in enumerate(projections):
        own = slice(i * each, (i + 1) * each)
        matrices = (tensor.matrix(e, own, f"{module}.{e}.{one}.weight") for e in range(experts))
        yield ExpertStack(f"{module}.{one}.weight", tuple(matrices))


def _cut_interleaved(tensor: StoredStack, module: str, projection: str, path: Path) -> Iterator[ExpertStack]:
    """`_cut` for stacks with alternating rows of gate and up, whose plain matrices are [in, out]."""
    transposed = isinstance(tensor, SafetensorsTensor)
    experts, rows = tensor.shape[0], tensor.shape[2 if transposed else 1]
    if 0 in tensor.shape:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} is empty: its shape is {list(tensor.shape)}")
    for one, first, step in _turns(projection):
        matrices = []
        for e in range(experts):
            name = f"{module}.{e}.{one}.weight"
            whole = tensor.matrix(e, slice(0, tensor.shape[1]), name)
            if isinstance(whole, SafetensorsTensor):
                whole = whole.transposed()
            matrices.append(whole if step == 1 else RowsOf(name, (whole,), np.arange(first, rows, step)))
        yield ExpertStack(f"{module}.{one}.weight", tuple(matrices))


def _cut_columns(tensor: SafetensorsTensor, module: str, projection: str, path: Path) -> Iterator[ExpertStack]:
    """`_cut` for matrices that are [in, out] (Llama 4)."""
    projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    experts, rows, columns = tensor.shape
    if 0 in tensor.shape:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} is empty: its shape is {list(tensor.shape)}")
    if columns % len(projections):
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has {columns} columns, not an even number")
    each = columns // len(projections)
    for i, one in enumerate(projections):
        own = np.arange(i * each, (i + 1) * each)
        whole = (tensor.matrix(e, slice(0, rows), f"{module}.{e}.{one}.weight").transposed() for e in range(experts))
        yield ExpertStack(f"{module}.{one}.weight", tuple(RowsOf(matrix.name, (matrix,), own) for matrix in whole))


def _cut_rows(
    tensor: SafetensorsTensor, module: str, projection: str, router: StoredTensor | None, path: Path
) -> ExpertStack:
    """A projection stored as the concatenated rows of all experts; down is transposed (DBRX, nomic-bert)."""
    if router is None:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} is of experts, whose number the router would say")
    experts, rows = router.shape[0], tensor.shape[0]
    if 0 in tensor.shape or not experts or rows % experts:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has {rows} rows, which {experts} experts cannot share")
    each, matrices = rows // experts, []
    for e in range(experts):
        matrix = replace(tensor.taken(np.arange(e * each, (e + 1) * each)), name=f"{module}.{e}.{projection}.weight")
        matrices.append(matrix.transposed() if projection == "down_proj" else matrix)
    return ExpertStack(f"{module}.{projection}.weight", tuple(matrices))


def _cut_bias(tensor: StoredTensor, module: str, projection: str) -> Iterator[StoredTensor]:
    for one, first, step in _turns(projection):
        yield ColumnsOf(f"{module}.{one}.bias", (tensor,), slice(first, None, step))


def _turns(projection: str) -> tuple[tuple[str, int, int], ...]:
    """The projections that a stack holds, each with its first row and the step to its next row."""
    return (("gate_proj", 0, 2), ("up_proj", 1, 2)) if projection == "gate_up_proj" else ((projection, 0, 1),)


def _stack(name: str, experts: Mapping[int, StoredTensor], path: Path) -> ExpertStack:
    for expert in range(len(experts)):
        if expert not in experts:
            published = next(iter(experts.values())).name
            missing = re.sub(r"\.experts\.\d+\.", f".experts.{expert}.", published)
            raise CheckpointError(f"{path}: tensor {missing!r} is missing, but expert {max(experts)} is there")
        if experts[expert].shape != experts[0].shape:
            raise CheckpointError(
                f"{path}: tensor {experts[expert].name!r} has shape {list(experts[expert].shape)}, "
                f"but that of expert 0 is {list(experts[0].shape)}"
            )
    return ExpertStack(name, tuple(experts[expert] for expert in range(len(experts))))
