"""Dropout modules that draw from the step's key without a dispatch mode, for users' own ``torch.compile``.

``ps.jit`` and the eager step need none of this: there plain ``nn.Dropout`` is keyed already.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..state.distributions import bernoulli
from ..state.errors import RandomOpError
from .random_ops import FIRST_STREAM

__all__ = ["KeyedDropout", "bind_key", "keyed_modules", "refuse_unkeyed"]


class KeyStream:
    """The key of one call and how many draws were made from it."""

    def __init__(self, key: Tensor | None) -> None:
        self.key, self.count = key, 0

    def bernoulli(self, p: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next draw."""
        if self.key is None:
            raise RandomOpError("KeyedDropout draws random numbers but no key was given")
        self.count += 1
        return bernoulli(self.key, p, shape, dtype=dtype, stream=FIRST_STREAM + self.count - 1)


class KeyedDropout(nn.Module):
    r"""Dropout whose mask is a function of the step's key: :math:`x \mapsto x\,m / (1 - p)`, :math:`m \sim B(1 - p)`.

    The bits are those of the plain module in the eager step.

    Args:
        p: the probability of a zero, in [0, 1).
        dims: trailing dimensions that share one draw: 0 for ``nn.Dropout``, n for ``nn.Dropout{n}d``.

    Raises:
        ValueError: if ``p`` lies outside [0, 1).
    """

    def __init__(self, p: float = 0.5, dims: int = 0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"p must lie in [0, 1), got {p}")
        self.p, self.dims = p, dims
        self.stream: KeyStream | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with elements zeroed and the rest scaled; ``x`` itself when evaluating."""
        if not self.training or self.p == 0.0:
            return x
        shape = (*x.shape[: x.dim() - self.dims], *(1,) * self.dims)
        noise = x.new_empty(shape)
        if torch.compiler.is_dynamo_compiling() and self.stream is not None:
            noise = self.stream.bernoulli(1.0 - self.p, shape, x.dtype)
        else:
            noise.bernoulli_(1.0 - self.p)  # answered from the key, as every random operation of a step is
        return x * (noise / (1.0 - self.p))

    def extra_repr(self) -> str:
        """The settings, for ``print``."""
        return f"p={self.p}, dims={self.dims}"


_DIMS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
_DROPOUTS = (*_DIMS, nn.AlphaDropout, nn.FeatureAlphaDropout)


def keyed_modules(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose dropout modules draw from the step's key as :class:`KeyedDropout`.

    Returns:
        A module with the same parameters and buffers under the same names, of its own storage.

    Raises:
        RandomOpError: if the model holds a random module without a keyed form.

    Example:
        >>> import torch
        >>> keyed_modules(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)))[1]
        KeyedDropout(p=0.1, dims=0)
    """
    model = copy.deepcopy(model)
    if _is_dropout(model):
        return _keyed(model)
    for name, part in list(model.named_modules()):
        if _is_dropout(part):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _keyed(part))
    return model


def _is_dropout(part: nn.Module) -> bool:
    return isinstance(part, _DROPOUTS)


def _keyed(part: Any) -> KeyedDropout:
    if type(part) not in _DIMS:
        raise RandomOpError(f"{type(part).__name__} has no keyed module; use ps.jit or the eager step, which key it")
    keyed = KeyedDropout(part.p, _DIMS[type(part)])
    keyed.train(part.training)
    return keyed


@contextlib.contextmanager
def bind_key(module: nn.Module, key: Tensor | None) -> Iterator[None]:
    """Give every :class:`KeyedDropout` below ``module`` this call's key."""
    parts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
    stream = KeyStream(key)
    for part in parts:
        part.stream = stream
    try:
        yield
    finally:
        for part in parts:
            part.stream = None


def refuse_unkeyed(module: nn.Module) -> None:
    """Under the user's own ``torch.compile`` plain dropout would draw from torch's generator: refuse it by name.

    Raises:
        RandomOpError: naming the module.
    """
    if not torch.compiler.is_dynamo_compiling():
        return
    for name, part in module.named_modules():
        random = _is_dropout(part) and getattr(part, "p", 0.0) > 0.0
        if part.training and (random or getattr(part, "dropout", 0.0) or isinstance(part, nn.RReLU)):
            raise RandomOpError(
                f"module {name} ({type(part).__name__}) would draw from torch's global generator under torch.compile; "
                "build the step with ps.keyed_modules(model), or compile it with ps.jit, which keys plain modules"
            )
