"""A program: one traced and compiled form of a step, and the call of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from ..state import torch_private
from ..state.errors import CompileError
from ..state.record import FlatState
from .compile_cache import refuse_damaged
from .compose import Step
from .device import Device
from .flat_step import FlatStep, Outputs, flat_step
from .lowering import rewrite
from .lowering.flat_inputs import pack_inputs
from .lowering.packing import Packing, plan
from .trace import trace_step

__all__ = ["Backend", "Program", "build", "on_device"]

Backend = Literal["inductor", "aot_eager", "eager"]


@attrs.frozen
class Program:
    """A compiled step for one form of inputs.

    Attributes:
        call: flat tensors in, changed leaves (unless donated) and metrics out.
        outputs: which leaves change, and the metrics' names.
        packing: how the leaves of a donated state are handed in; ``None`` for one by one.
    """

    call: Callable[..., Sequence[Tensor]]
    outputs: Outputs
    packing: Packing | None = None

    def run(self, state: FlatState, tensors: list[Tensor], *, donate: bool) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The leaves of the new state, and the metrics in the order of their names."""
        out = self.call(*state.inputs, *tensors)
        if donate:
            return state.leaves, out
        changed = self.outputs.changed
        new = list(state.leaves)
        for place, value in zip(changed, out[: len(changed)], strict=True):
            new[place] = value
        return new, out[len(changed) :]


def build(
    step: Step,
    device: Device,
    backend: Backend,
    state: FlatState,
    batch: tuple[list[Any], Any],
    *,
    donate: bool,
    packing: Packing | None = None,
    edit: Callable[[torch.fx.GraphModule], None] | None = None,
) -> Program:
    """Trace and compile a step for the form of these inputs.

    Args:
        step: from ``compose``.
        device: where it runs.
        backend: how it is compiled.
        state: leaves and structure.
        batch: leaves and structure.
        donate: whether the new leaves are written into the old ones.
        packing: how the leaves lie already, where another program packed them.
        edit: changes the graph before it is compiled.

    Raises:
        TraceError: if it cannot be one graph.
        CompileError: if Inductor cannot compile it here.
    """
    if not device.traceable:
        raise CompileError(f"device {device.name} cannot be traced into a graph; run the step eagerly on it")
    step = step.apart()
    tensors = [leaf for leaf in batch[0] if isinstance(leaf, Tensor)]
    flat = flat_step(on_device(step, device), state, batch, donate=donate)
    if backend == "eager":
        return Program(_without_grad(flat), flat.outputs)
    traced = trace_step(step, flat, [*state.leaves, *tensors])
    if backend == "aot_eager":
        return Program(_without_grad(attrs.evolve(flat, fn=traced.graph)), flat.outputs)
    refuse_damaged()
    inputs = traced.inputs
    if donate:
        packing = packing or plan(state.leaves, state.treedef.paths(), flat.outputs.changed)
        inputs = pack_inputs(traced.graph, inputs, packing, traced.mode)
    if edit is not None:
        edit(traced.graph)
    try:
        compiled = torch_private.compile_graph(traced.graph, traced.mode, inputs, rewrite)
    except Exception as error:
        raise CompileError(_explain(error)) from error
    return Program(compiled, flat.outputs, packing)


def on_device(step: Step, device: Device) -> Callable[..., Any]:
    """The step without its checks, its sums reduced by a device."""

    def run(state: Any, batch: Any) -> Any:
        return step.run(state, batch, device)

    return run


def _without_grad(flat: FlatStep) -> Callable[..., Sequence[Tensor]]:
    def call(*inputs: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return flat.fn(*inputs)

    return call


def _explain(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        advice = "there is no C++ compiler on the path: install one, such as g++"
    else:
        folder = torch_private.compile_cache_folder()
        advice = f"if it compiled before, the compile cache may be damaged: remove {folder}"
    return (
        f"Inductor could not compile the step ({text[0]}). Nothing was run; {advice}. "
        'backend="aot_eager" runs the same graph without compiling it'
    )
