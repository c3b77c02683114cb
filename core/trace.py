"""Trace: a flat step becomes one graph of tensor operations; what cannot be traced is refused with its line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state import torch_private
from ..state.errors import PurestepError, TraceError
from ..steps.random_rules import draws
from .closures import refuse_closed_over
from .compose import Step
from .flat_step import FlatStep

__all__ = ["Traced", "trace_step"]


@attrs.frozen
class Traced:
    """A graph, and the fake tensors it was recorded with."""

    graph: torch.fx.GraphModule
    mode: Any
    inputs: list[Tensor]


def trace_step(step: Step, flat: FlatStep, inputs: Sequence[Tensor]) -> Traced:
    """Record the step into one graph.

    Raises:
        TraceError: naming the line that branches on a value, the tensor that is closed over, or the operation that
            is random without a key.
    """
    mode = torch_private.fake_mode()
    fakes = [torch_private.fake_of(mode, tensor) for tensor in inputs]
    try:
        graph = torch_private.trace(flat.fn, mode, fakes)
    except PurestepError:
        raise
    except Exception as error:
        if torch_private.reads_a_value(error):
            raise TraceError(
                f"the step reads a tensor's value while it is traced{_line(error)}: a branch, a loop or a number that "
                "depends on data cannot be part of one graph. Use torch.where, keep the number a 0-d tensor, or run "
                "the step eagerly"
            ) from error
        raise
    refuse_closed_over(graph, step)
    _refuse_random(graph)
    graph.graph.eliminate_dead_code()  # such as keys that nothing was drawn from
    graph.recompile()
    return Traced(graph, mode, fakes)


def _line(error: BaseException) -> str:
    """Where it happened: the innermost line of the user's below our own, and the module that was running."""
    frames = [
        (Path(frame.f_code.co_filename).resolve(), frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    inside = next((i for i, (path, _, _) in enumerate(frames) if path == Path(__file__).resolve()), 0)
    words = ""
    for path, frame, line in reversed(frames[inside:]):
        module = frame.f_locals.get("self")
        if not words and isinstance(module, torch.nn.Module):
            words = f", in {type(module).__name__}.{frame.f_code.co_name}"
        if path.suffix == ".py" and not any(package in path.parents for package in _PACKAGES):
            return f"{words}, at {path}:{line}: {linecache.getline(str(path), line).strip()}"
    return words


_OURS = Path(__file__).resolve().parent.parent
_PACKAGES = [_OURS / folder for folder in ("core", "steps", "state", "devices")] + [
    Path(torch.__file__).resolve().parent
]


def _refuse_random(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        value = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, torch.fx.GraphModule):
            _refuse_random(value)
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags and not _switched_off(node):
            raise TraceError(f"{node.target} is left in the graph and would draw from torch's global generator")


def _switched_off(node: torch.fx.Node) -> bool:
    return not draws(node.target, node.args, node.kwargs)
