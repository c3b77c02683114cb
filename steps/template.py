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
from ..state.torch_private import has_hooks, is_compiled
from ..state.tree import leaves
from .containers import Container, containers, refuse_closures, restore
from .plain_kernels import use_plain_kernels

__all__ = ["Template"]

Place = tuple[Any, Any, str]


class Template:
    """A private copy of a module whose parameters and buffers lie on the meta device.

    The copy keeps the train and eval flags and the hooks of the moment; later changes of the original have no effect.
    :meth:`bound` puts tensors in the places of the parameters and buffers, and puts everything back at the end: also what
    the module's own code changed about itself, its flags, attributes, lists and objects, so that nothing of a call stays.

    Args:
        module: the module to copy. Parameters and buffers lose their values; other tensors that it holds are copied.

    Raises:
        StateError: if the module is lazy or compiled, keeps extra state, has hooks on parameters, holds a parameter where
            it cannot be replaced (a tuple, a function that closes over it), or cannot be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
        _refuse(module)
        self.layout = Layout.of(module)
        params, buffers = named_params(module), named_buffers(module)
        self.trainable = frozenset(name for name, param in params.items() if param.requires_grad)
        self.module, copied = _copy_without_values(module, {**params, **buffers})
        use_plain_kernels(self.module)
        names = {id(tensor): name for name, tensor in {**self.params, **self.buffers}.items()}
        held = list(containers(self.module, copied))
        self._containers = [container for _, container in held]
        self._places = [place for path, container in held for place in _places(path, container, names)]
        self._names = frozenset(name for name, _ in self._named())
        self.constants = dict(_constants(held, names))

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
            restore(kept)

    def written_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers as they are inside :meth:`bound`: a module may replace one instead of writing into it.

        Raises:
            StateError: naming a parameter or buffer that the forward made or removed: a state keeps its form.
        """
        made = dict(self._named())
        changed = sorted(self._names ^ made.keys())
        if changed:
            how = "made {}, which is absent or None" if changed[0] in made else "removed {}, which is there"
            raise StateError(
                f"the forward {how.format(changed[0])} in the module that the step was built with; a state keeps its form: "
                "give it a value there"
            )
        return {**buffers, **{name: made[name] for name in buffers}}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_parameters(remove_duplicate=False)
        yield from self.module.named_buffers(remove_duplicate=False)


def _refuse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if is_compiled(part):
            raise StateError(
                f"{name or 'the model'} is wrapped by torch.compile, which cannot be traced again; hand in the module "
                "itself: ps.jit compiles the whole step"
            )
    for name, param in named_params(module).items():
        if has_hooks(param):
            raise StateError(
                f"parameter {name} has a hook, which a gradient taken on tensors of the state's own does not run; put a "
                "function between ps.backward() and ps.accumulate() instead: it maps the Sums of a microbatch"
            )
    refuse_closures(module)


def _places(path: str, container: Any, names: Mapping[int, str]) -> Iterator[Place]:
    """Where a table, or a list or dict beside the tables, holds parameters and buffers."""
    if isinstance(container, set):
        return
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if id(value) in names:
            yield container, key, names[id(value)]
            continue
        inside = [names[id(leaf)] for leaf in leaves(value) if id(leaf) in names] if isinstance(value, tuple) else []
        if inside:
            raise StateError(
                f"the module's attribute {path}{'.' if path else ''}{key} holds {inside[0]} in a tuple, where it cannot be "
                "replaced by the state's tensor; keep a list, or look it up in forward"
            )


def _constants(held: list[Container], names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in attributes that are neither parameters nor buffers, by path."""
    for path, container in held:
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            for leaf in leaves(value) if isinstance(value, tuple) else (value,):
                if isinstance(leaf, Tensor) and id(leaf) not in names:
                    word = f"[{key!r}]" if path and not str(key).isidentifier() else f"{'.' if path else ''}{key}"
                    yield path + word, leaf


def _copy_without_values(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, set[int]]:
    """A copy on the meta device, and the ids of all that was copied with it."""
    memo: dict[int, Any] = {}
    for tensor in tensors.values():
        empty = torch.empty_like(tensor.detach(), device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise StateError(
            f"module {type(module).__name__} cannot be copied as a template: {error}. An attribute that holds a tensor "
            "with a graph, a lock or an open file is the usual reason; make it a buffer or create it in forward"
        ) from error
    return made, {id(twin) for original, twin in memo.items() if id(twin) != original}


def _check_names(what: str, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unknown:
        parts = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise StateError(f"{what} do not fit the module that the step was built with: {'; '.join(parts)}")
