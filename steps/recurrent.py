"""LSTM layers in a form that a graph can hold.

On the CPU torch hands a training LSTM to a fused kernel of oneDNN whose saved workspace no trace can carry. Here it is
computed by torch's own operations instead, eagerly as well, so that both forms of a step have the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..state.torch_private import switch_onednn

__all__ = ["unfuse_lstm"]

_switched: list[bool] = []  # forwards take turns, so that one stack serves all


def unfuse_lstm(module: nn.Module) -> None:
    """Switch oneDNN off for the time of each LSTM layer's forward, by hooks on this module."""
    for part in module.modules():
        if isinstance(part, nn.LSTM) and not hasattr(part, _MARK):
            part.register_forward_pre_hook(_off)
            part.register_forward_hook(_back, always_call=True)
            setattr(part, _MARK, True)


_MARK = "_purestep_unfused"


def _off(module: nn.Module, args: Any) -> None:
    _switched.append(switch_onednn(on=False))


def _back(module: nn.Module, args: Any, output: Any) -> None:
    switch_onednn(on=_switched.pop())
