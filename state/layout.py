"""How the leaves of a state lie in a module: names that share a leaf, buffers that are not saved."""

from __future__ import annotations

from itertools import pairwise

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import StateError

__all__ = ["Layout", "byte_reach", "named_buffers", "named_params"]


@attrs.frozen
class Layout:
    """Static facts that ``state_dict`` needs and no tensor holds.

    Attributes:
        aliases: pairs (name, leaf): ``name`` is another name of the leaf ``leaf``.
        transient: buffers that a ``state_dict`` leaves out.
        module: whether the params came from a module, by name.
    """

    aliases: tuple[tuple[str, str], ...] = ()
    transient: tuple[str, ...] = ()
    module: bool = True

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module.

        Raises:
            StateError: if the module is lazy, keeps extra state, or parameters overlap in memory without being one.
        """
        _refuse(module)
        aliases: list[tuple[str, str]] = []
        for every in (
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        ):
            first: dict[int, str] = {}
            for name, tensor in every:
                leaf = first.setdefault(id(tensor), name)
                if leaf != name:
                    aliases.append((name, leaf))
        return cls(tuple(aliases), _transient_buffers(module))


def named_params(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters, each once, by its first name."""
    return dict(module.named_parameters())


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The module's buffers, each once, by its first name."""
    return dict(module.named_buffers())


def _transient_buffers(module: nn.Module) -> tuple[str, ...]:
    saved = module.state_dict(keep_vars=True)
    return tuple(name for name, _ in module.named_buffers(remove_duplicate=False) if name not in saved)


def _refuse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise StateError(
                f"module {name or type(part).__name__} keeps extra state outside its parameters and buffers "
                "(get_extra_state), which a state of tensors cannot carry; register it as a buffer"
            )
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise StateError(f"parameter {name} is lazy and has no shape yet; run the module once on a batch first")
        if param.is_meta or param.numel() == 0:
            continue
        other, tensor = owners.setdefault(param.untyped_storage().data_ptr(), (name, param))
        if tensor is not param:
            raise StateError(
                f"parameters {other} and {name} share memory but are two tensors; training them apart would untie them. "
                "Use one Parameter under both names"
            )
    _refuse_overlap(module)


def _refuse_overlap(module: nn.Module) -> None:
    """Two buffers over the same bytes, or a buffer over a parameter's: a write into one would not reach the other."""
    params = {name: param for name, param in module.named_parameters() if not is_lazy(param)}
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + byte_reach(tensor), name, name in params)
        for name, tensor in (*params.items(), *module.named_buffers())
        if not tensor.is_meta and tensor.layout == torch.strided and tensor.numel()
    ]
    spans.sort()
    for (_, end, one, is_param), (start, _, other, is_other_param) in pairwise(spans):
        if start < end and not (is_param and is_other_param):
            raise StateError(
                f"{one} and {other} lie over the same memory, and a state has a tensor of its own for each; register one of "
                "them and take the other as a view of it in forward"
            )


def byte_reach(tensor: Tensor) -> int:
    """From the first to behind the last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
