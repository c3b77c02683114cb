"""Tensors that a traced step closed over: found in the graph, named by where the user's code holds them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..state.constants import is_constant
from ..state.errors import TraceError
from .compose import Step

__all__ = ["held", "refuse_closed_over"]


def refuse_closed_over(graph: torch.fx.GraphModule, step: Step) -> None:
    """Refuse a graph with a tensor that is neither an input, nor made inside, nor a ``ps.constant``.

    Raises:
        TraceError: naming the variable that holds it.
    """
    for tensor in _foreign(graph):
        raise TraceError(
            f"the step closes over {_name(tensor, step)}, a {str(tensor.dtype).removeprefix('torch.')} tensor of shape "
            f"{tuple(tensor.shape)}. It would be frozen into the compiled step. Use the module that the loss is handed, put "
            "the tensor into the batch, register it as a buffer, or wrap it in ps.constant(...) if it never changes"
        )


def _foreign(graph: torch.fx.GraphModule) -> Iterator[Tensor]:
    for node in graph.graph.nodes:
        if node.op != "get_attr":
            continue
        value = _attribute(graph, node.target)
        if isinstance(value, torch.fx.GraphModule):
            yield from _foreign(value)
        elif isinstance(value, Tensor) and not is_constant(value) and not _made_inside(node):
            yield value


def _attribute(graph: torch.fx.GraphModule, target: str) -> Any:
    value: Any = graph
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _made_inside(node: torch.fx.Node) -> bool:
    """``torch.tensor([...])`` in a loss leaves a constant whose first use is the lift of a fresh tensor."""
    lifts = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return all(user.target in lifts for user in node.users)


def _name(tensor: Tensor, step: Step) -> str:
    for where, value in held(step):
        if value is tensor:
            return where
        if isinstance(value, nn.Module):
            for name, own in (*value.named_parameters(), *value.named_buffers()):
                if own is tensor:
                    return f"{where}.{name}"
    return "a tensor"


def held(step: Step) -> Iterator[tuple[str, Any]]:
    """What the step's functions can reach, with names: closures, globals, defaults; and the template's attributes."""
    for concern in step.concerns:
        for fn in (getattr(concern, "loss", None), getattr(concern, "fn", None)):
            if callable(fn):
                yield from _reach(fn)
        template = getattr(concern, "template", None)
        if template is not None:
            for prefix, part in template.module.named_modules():
                for name, value in vars(part).items():
                    yield f"model.{prefix}.{name}" if prefix else f"model.{name}", value


def _reach(fn: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(fn, functools.partial):
        yield from ((f"argument {name}", value) for name, value in fn.keywords.items())
        yield from ((f"argument {i}", value) for i, value in enumerate(fn.args))
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if code is None:
        return
    yield from vars(fn).items() if hasattr(fn, "__dict__") else ()
    plain = inspect.unwrap(fn)
    for name, cell in zip(code.co_freevars, getattr(plain, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    known = getattr(plain, "__globals__", {})
    yield from ((name, known[name]) for name in code.co_names if name in known)
    names = reversed(code.co_varnames[: code.co_argcount])
    yield from zip(names, reversed(getattr(plain, "__defaults__", None) or ()), strict=False)
