"""What a module can change about itself: its attributes, and the containers and objects that hang below them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..state.errors import StateError
from ..state.torch_private import module_tables

__all__ = ["Container", "containers", "refuse_closures", "restore"]

Container = tuple[str, Any]


def containers(module: nn.Module, copied: set[int]) -> Iterator[Container]:
    """Every dict, list, deque and set below a module, with its path; those of objects too.

    Args:
        module: a copied module.
        copied: ids of all that was copied with it. Objects that a copy shares with the original (loggers, classes) belong
            to nobody and are left alone.
    """
    seen = set[int]()
    waiting: deque[Container] = deque()
    for prefix, part in module.named_modules():
        waiting.append((prefix, part.__dict__))
        waiting.extend((prefix, table) for table in module_tables(part).values())
    while waiting:
        path, container = waiting.popleft()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if isinstance(container, (dict, list, deque, set)):
            yield path, container
        waiting.extend(_below(path, container, copied))


def _below(path: str, container: Any, copied: set[int]) -> Iterator[Container]:
    entries: Any = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in entries:
        place = _joined(path, key)
        if isinstance(value, (dict, list, deque, set, tuple)):
            yield place, value
        elif id(value) in copied and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
            yield place, value.__dict__


_OPAQUE = (Tensor, type, FunctionType, ModuleType)


def _joined(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def restore(kept: list[tuple[Any, Any]]) -> None:
    """Refill each container with its copy."""
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
            container.update(content) if isinstance(container, set) else container.extend(content)


_ABSENT = object()


def refuse_closures(module: nn.Module) -> None:
    """A function that closes over the module is shared by every copy of it, and would call the original for ever.

    Raises:
        StateError: naming the attribute and what it closes over.
    """
    owned: dict[int, str] = {}
    for name, part in module.named_modules():
        owned[id(part)] = name or "the module"
    owned.update({id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())})
    for prefix, part in module.named_modules():
        for place, fn in _functions(part):
            for variable, value in _closed_over(fn):
                if id(value) in owned:
                    raise StateError(
                        f"{_joined(prefix, place)} is a function that closes over {owned[id(value)]} (as {variable!r}); a "
                        "copy of the module would go on using the original's parameters. Make it a method, or take what it "
                        "needs as arguments"
                    )


def _functions(part: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(part).items():
        inside: Mapping[Any, Any] = value if isinstance(value, dict) else {name: value}
        yield from ((name, fn) for fn in inside.values() if isinstance(fn, FunctionType))


def _closed_over(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    names = getattr(fn, "__code__").co_freevars  # noqa: B009 (Callable has no such attribute for mypy)
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    yield from (("a default", value) for value in getattr(fn, "__defaults__", None) or ())
