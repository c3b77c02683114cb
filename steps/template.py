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
from ..state.torch_private import has_hooks, module_tables
from ..state.tree import leaves, leaves_with_paths
from .recurrent import unfuse_lstm

__all__ = ["Template"]

Place = tuple[Any, Any, str]


class Template:
    """A private copy of a module whose parameters and buffers lie on the meta device.

    The copy keeps the train and eval flags and the hooks of the moment; later changes of the original have no effect.
    :meth:`bound` puts tensors in the places of the parameters and buffers, and puts everything back at the end: also what
    the module's own code changed about itself, its flags, attributes, lists and dicts, so that nothing of a call stays.

    Args:
        module: the module to copy. Parameters and buffers lose their values; other tensors that it holds are copied.

    Raises:
        StateError: if the module is lazy, keeps extra state, has hooks on parameters, keeps a parameter or buffer in an
            attribute beside its place, or cannot be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
        self.layout = Layout.of(module)
        params, buffers = named_params(module), named_buffers(module)
        self.trainable = frozenset(name for name, param in params.items() if param.requires_grad)
        _refuse_hooks(params)
        self.module = _copy_without_values(module, {**params, **buffers})
        unfuse_lstm(self.module)
        names = {id(tensor): name for name, tensor in {**self.params, **self.buffers}.items()}
        self.constants = _constants(self.module, names)
        self._containers = [container for part in self.module.modules() for container in _containers(part)]
        self._places = [place for container in self._containers for place in _places(container, names)]
        self._buffer_names = frozenset(name for name, _ in self.module.named_buffers(remove_duplicate=False))

    def copy(self) -> Template:
        """A template of its own, for code that may leave something behind, as tracing does with caches."""
        return Template(self.module)

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
        _check_names("params", self.params, params)
        _check_names("buffers", self.buffers, buffers)
        kept = [(container, container.copy()) for container in self._containers]
        tensors = {**params, **buffers}
        try:
            for container, key, name in self._places:
                container[key] = tensors[name]
            yield self.module
        finally:
            _restore(kept)

    def written_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers as they are inside :meth:`bound`: a module may replace one instead of writing into it.

        Raises:
            StateError: naming a buffer that the module made anew: a state keeps its form.
        """
        made = dict(self.module.named_buffers(remove_duplicate=False))
        new = [name for name in made if name not in self._buffer_names]
        if new:
            raise StateError(
                f"the forward made buffer {new[0]}, which is absent or None in the module that the step was built with; a "
                "state keeps its form, so give it a value there"
            )
        return {**buffers, **{name: made[name] for name in buffers}}


def _containers(part: nn.Module) -> Iterator[Any]:
    """Everything in a module that its code can change: its attributes, its tables, and lists, dicts and sets below."""
    waiting: list[Any] = [part.__dict__]
    seen = set[int]()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        yield container
        if not isinstance(container, set):
            values = container.values() if isinstance(container, dict) else container
            waiting.extend(value for value in values if isinstance(value, (dict, list, set)))


def _restore(kept: list[tuple[Any, Any]]) -> None:
    # The same containers are refilled rather than replaced: a compiler that traces this holds on to them.
    for container, content in kept:
        if isinstance(container, dict):
            for name in [name for name in container if name not in content]:
                del container[name]
            for name, value in content.items():
                if container.get(name, _ABSENT) is not value:
                    container[name] = value
        elif isinstance(container, list):
            container[:] = content
        else:
            container.clear()
            container |= content


_ABSENT = object()


def _refuse_hooks(params: Mapping[str, Tensor]) -> None:
    for name, param in params.items():
        if has_hooks(param):
            raise StateError(
                f"parameter {name} has a hook, which a gradient taken on tensors of the state's own does not run; put a "
                "function between ps.backward() and ps.accumulate() instead: it maps the Sums of a microbatch"
            )


def _places(container: Any, names: Mapping[int, str]) -> Iterator[Place]:
    """Where a table, or a list or dict beside the tables, holds parameters and buffers."""
    if isinstance(container, set):
        return
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if id(value) in names:
            yield container, key, names[id(value)]
        elif isinstance(value, tuple) and any(id(leaf) in names for leaf in leaves(value)):
            raise StateError(
                f"the module's attribute {key!r} holds {names[next(id(x) for x in leaves(value) if id(x) in names)]} in a "
                "tuple, where it cannot be replaced by the state's tensor; keep a list, or look it up in forward"
            )


def _constants(module: nn.Module, names: Mapping[int, str]) -> dict[str, Tensor]:
    """The tensors in attributes that are neither parameters nor buffers, by path."""
    found: list[tuple[str, Any]] = []
    for prefix, part in module.named_modules():
        tables = [id(table) for table in module_tables(part).values()]
        for name, value in vars(part).items():
            if id(value) not in tables:
                found += leaves_with_paths(value, f"{prefix}.{name}" if prefix else name)
    return {path: leaf for path, leaf in found if isinstance(leaf, Tensor) and id(leaf) not in names}


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


def _check_names(what: str, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unknown:
        parts = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise StateError(f"{what} do not fit the module that the step was built with: {'; '.join(parts)}")
