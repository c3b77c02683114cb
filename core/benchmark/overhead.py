"""The host's share: the time of a call whose graph has the same inputs and outputs and no arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..jitted import Jitted

__all__ = ["Emptied"]


class Emptied(Jitted):
    """A compiled step that computes nothing: what its call costs is what calling a compiled step costs.

    Checks, look-ups, the handing over of every leaf and the making of every output stay; donated leaves keep their values.
    """

    @staticmethod
    def _edit(graph: fx.GraphModule) -> None:
        output = next(node for node in graph.graph.nodes if node.op == "output")
        outputs = [node.meta["val"] for node in output.args[0]]
        for node in reversed(list(graph.graph.nodes)):
            if node.op != "placeholder":
                graph.graph.erase_node(node)
        graph.graph.output(tuple(_made(graph.graph, value) for value in outputs))
        graph.recompile()


def _made(graph: fx.Graph, like: Tensor) -> Any:
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    node = graph.call_function(torch.ops.aten.full.default, (list(like.shape), 0), options)
    node.meta["val"] = like
    return node
