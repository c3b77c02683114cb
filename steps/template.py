"""A module as a template: its code and flags, without its values, bound to a state's tensors for the time of a call."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..state.errors import StateError
from ..state.layout import Layout, named_buffers, named_params
from ..state.torch_private import module_tables

__all__ = ["Template"]

Place = tuple[nn.Module, str, str]


class Template:
    """A private copy of a module whose parameters and buffers lie on the meta device.

    The copy keeps the train and eval flags and the hooks of the moment; later changes of the original have no effect.
    :meth:`bound` puts tensors in the places of the parameters and buffers, and puts everything back at the end: also what
    the module's own code changed about itself, such as flags and attributes, so that nothing of a call stays alive.

    Args:
        module: the module to copy; its tensors are not copied.

    Raises:
        StateError: if the module is lazy, keeps extra state, or cannot be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
        self.layout = Layout.of(module)
        params, buffers = named_params(module), named_buffers(module)
        self.trainable = frozenset(name for name, param in params.items() if param.requires_grad)
        self.module = _copy_without_values(module, {**params, **buffers})
        self._modules = list(self.module.modules())
        self._params = _places(self._modules, "params", named_params(self.module))
        self._buffers = _places(self._modules, "buffers", named_buffers(self.module))

    @property
    def params(self) -> dict[str, Tensor]:
        """Shapes and dtypes of the parameters, on the meta device."""
        return named_params(self.module)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Shapes and dtypes of the buffers, on the meta device."""
        return named_buffers(self.module)

    @contextlib.contextmanager
    def bound(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The module with these tensors in its places. Buffers may be written in place: hand in copies.

        Raises:
            StateError: naming the parameters or buffers that are missing or unknown.
        """
        _check_names("params", {name for _, _, name in self._params}, params)
        _check_names("buffers", {name for _, _, name in self._buffers}, buffers)
        kept = [_contents(part) for part in self._modules]
        try:
            for part, key, name in self._params:
                module_tables(part)["params"][key] = params[name]
            for part, key, name in self._buffers:
                module_tables(part)["buffers"][key] = buffers[name]
            yield self.module
        finally:
            for part, (attributes, tables) in zip(self._modules, kept, strict=True):
                _restore(part, attributes, tables)

    def written_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers as they are inside :meth:`bound`: a module may replace one instead of writing into it."""
        return {**buffers, **{name: module_tables(part)["buffers"][key] for part, key, name in self._buffers}}


def _contents(part: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    return dict(part.__dict__), {name: dict(table) for name, table in module_tables(part).items()}


def _restore(part: nn.Module, attributes: dict[str, Any], tables: dict[str, dict[str, Any]]) -> None:
    # The same dictionaries are refilled rather than replaced: a compiler that traces this holds on to them.
    for name in [name for name in part.__dict__ if name not in attributes]:
        del part.__dict__[name]
    for name, value in attributes.items():
        if part.__dict__[name] is not value:
            part.__dict__[name] = value
    for name, mapping in module_tables(part).items():
        content = tables[name]
        for key in [key for key in mapping if key not in content]:
            del mapping[key]
        for key, value in content.items():
            mapping[key] = value


def _copy_without_values(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in tensors.values():
        empty = torch.empty_like(tensor.detach(), device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise StateError(
            f"module {type(module).__name__} cannot be copied as a template: {error}. An attribute that holds a tensor "
            "with a graph, a lock or an open file is the usual reason; make it a buffer or create it in forward"
        ) from error


def _places(modules: list[nn.Module], table: str, names: Mapping[str, Tensor]) -> list[Place]:
    """Where each tensor lies, once per distinct module: one shared under two names has one place."""
    name_of = {id(tensor): name for name, tensor in names.items()}
    return [
        (part, key, name_of[id(tensor)])
        for part in modules
        for key, tensor in module_tables(part)[table].items()
        if tensor is not None
    ]


def _check_names(what: str, expected: set[str], given: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected - given.keys()), sorted(given.keys() - expected)
    if missing or unknown:
        parts = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise StateError(f"{what} do not fit the module that the step was built with: {'; '.join(parts)}")
