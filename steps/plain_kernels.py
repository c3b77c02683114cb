"""Modules whose kernels depend on how they are run, in the one form that a graph can hold.

On the CPU torch hands a training LSTM to a fused kernel of oneDNN whose saved workspace no trace can carry, and an
attention layer that needs no gradient to a fast path that a trace does not take. Here they are computed by torch's own
operations instead, eagerly as well, so that both forms of a step have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..state.torch_private import switch_onednn

__all__ = ["use_plain_kernels"]


def use_plain_kernels(module: nn.Module) -> None:
    """Switch the special kernels off for the time of each such layer's forward, by hooks on this module."""
    for part in module.modules():
        if isinstance(part, _SPECIAL) and not hasattr(part, _MARK):
            part.register_forward_pre_hook(_off)
            part.register_forward_hook(_back, always_call=True)
            setattr(part, _MARK, True)


_SPECIAL = (nn.LSTM, nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_MARK = "_purestep_plain"
_before: list[tuple[bool, bool]] = []  # forwards take turns, so that one stack serves all


def _off(module: nn.Module, args: Any) -> None:
    onednn = switch_onednn(on=False) if isinstance(module, nn.LSTM) else switch_onednn()
    _before.append((onednn, torch.backends.mha.get_fastpath_enabled()))
    torch.backends.mha.set_fastpath_enabled(False)


def _back(module: nn.Module, args: Any, output: Any) -> None:
    onednn, fast = _before.pop()
    switch_onednn(on=onednn)
    torch.backends.mha.set_fastpath_enabled(fast)
