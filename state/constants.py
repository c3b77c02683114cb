"""Tensors that a step may close over."""

from __future__ import annotations

from torch import Tensor

__all__ = ["constant", "is_constant"]

_MARK = "_purestep_constant"


def constant(tensor: Tensor) -> Tensor:
    """A copy of a tensor that a loss may close over, such as class weights: it becomes a constant of the graph.

    Any other tensor that a loss closes over is refused by ``jit``, since a later change of it would have no effect.

    Args:
        tensor: any tensor; a gradient does not flow into it.

    Example:
        >>> import torch
        >>> weights = constant(torch.tensor([1.0, 2.0]))
    """
    copy = tensor.detach().clone()
    setattr(copy, _MARK, True)
    return copy


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor came from :func:`constant`."""
    return bool(getattr(tensor, _MARK, False))
