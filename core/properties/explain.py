"""Where two runs part: the first concern, and the first operation, whose bits differ."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ...state.record import FlatState, TrainState, copy_state
from ...state.torch_private import DispatchMode
from ...state.tree import flatten, leaves, leaves_with_paths
from ..compose import Step
from ..flat_step import flat_step
from ..jit import jit
from ..jitted import Jitted
from ..program import on_device
from ..trace import trace_step
from .difference import Difference, first_difference
from .tape import TAP, concern_of, tapped

__all__ = ["Explanation", "explain_difference"]


@attrs.frozen
class Explanation:
    """Where two runs differ first.

    Attributes:
        concern: the concern whose output differs, with all before it equal.
        difference: its first differing element.
        operation: the first tensor operation that gave other bits for equal inputs, with the line of code where the step
            ran eagerly; ``None`` where the inputs of the run differ, two steps are compared, or Inductor compiled them.
    """

    concern: str
    difference: Difference
    operation: str | None = None

    def __str__(self) -> str:
        operation = f", in {self.operation}" if self.operation else ""
        return f"{self.concern}{operation}: {self.difference}"


def explain_difference(
    step: Step | Jitted,
    state: TrainState,
    batch: Any,
    *,
    against: Step | Jitted | None = None,
    other_state: TrainState | None = None,
    other_batch: Any = None,
    between: Callable[[], None] | None = None,
) -> Explanation | None:
    """Run twice, and say at which concern and in which operation the first bit differs.

    The two runs are of ``step`` and of ``against`` (the same step by default), from ``state`` and ``other_state``, on
    ``batch`` and ``other_batch``.

    Args:
        step: a step, or a compiled one: then its backend is used.
        state: the state of the first run; not changed.
        batch: the batch of the first run.
        against: what the second run runs.
        other_state: the state of the second run; ``state`` by default.
        other_batch: the batch of the second run; ``batch`` by default.
        between: called before the second run, to disturb what must not matter (seeds, threads).

    Returns:
        The first difference, or ``None`` if every bit is equal.

    Raises:
        ValueError: if the two steps have other concerns.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> one, two = (
        ...     ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(lr))) for lr in (1.0, 2.0)
        ... )
        >>> state = ps.init(torch.tensor(0.0), one)
        >>> print(ps.explain_difference(one, state, torch.ones(2), against=two).concern)
        optimizerstep
    """
    second = step if against is None else against
    later_state, later_batch = (
        state if other_state is None else other_state,
        batch if other_batch is None else other_batch,
    )
    one = _taps(step, state, batch)
    if between is not None:
        between()
    other = _taps(second, later_state, later_batch)
    found = _first(one, other)
    if found is None:
        return None
    if second is not step or (isinstance(step, Jitted) and step.backend == "inductor"):
        return found
    run = _graph(step, state, batch) if isinstance(step, Jitted) else _eager(step)
    operations = run(state, batch)
    if between is not None:
        between()
    return attrs.evolve(found, operation=_first_operation(operations, run(later_state, later_batch)))


def _taps(step: Step | Jitted, state: TrainState, batch: Any) -> dict[str, Tensor]:
    if isinstance(step, Jitted):
        run: Any = jit(tapped(step.step), device=step.device, backend=step.backend)
    else:
        run = tapped(step)
    new, metrics = run(copy_state(state), batch)
    ends = {f"{TAP}999999 step\n{path}": leaf for path, leaf in leaves_with_paths(new, "state")}
    return {**{name: value for name, value in metrics.items() if name.startswith(TAP)}, **ends}


def _first(one: dict[str, Tensor], other: dict[str, Tensor]) -> Explanation | None:
    if one.keys() != other.keys():
        names = sorted(one.keys() ^ other.keys())
        raise ValueError(f"the two runs do not have the same concerns and leaves: {concern_of(names[0])[0]}")
    for name in one:
        concern, path = concern_of(name)
        found = first_difference(one[name], other[name], path)
        if found is not None:
            return Explanation(concern, found)
    return None


@attrs.frozen
class _Operation:
    name: str
    line: str
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call] # torch's class is not annotated
    """Every operation that is run, with copies of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor is its constructor
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = _copies((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.operations.append(_Operation(str(func), _users_line(), inputs, _copies(result)))
        return result


Operations = Callable[[TrainState, Any], list[_Operation]]


def _eager(step: Step) -> Operations:
    def run(state: TrainState, batch: Any) -> list[_Operation]:
        recorder = _Recorder()
        with torch.no_grad(), recorder:
            step.run(state, batch)
        return recorder.operations

    return run


def _graph(step: Jitted, state: TrainState, batch: Any) -> Operations:
    """The operations of the traced graph, which both runs go through."""
    values, treedef = flatten(step.device.place(batch))
    own = step.step.apart()
    flat = flat_step(on_device(own, step.device), FlatState(*flatten(state)), (values, treedef), donate=False)
    graph = trace_step(own, flat, [*flatten(state)[0], *(x for x in values if isinstance(x, Tensor))]).graph

    def run(state: TrainState, batch: Any) -> list[_Operation]:
        tensors = [x for x in flatten(step.device.place(batch))[0] if isinstance(x, Tensor)]
        recorder = _Recorder()
        with torch.no_grad(), recorder:
            graph(*flatten(state)[0], *tensors)
        return recorder.operations

    return run


def _copies(tree: Any) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone() for x in leaves(tree) if isinstance(x, Tensor))


def _first_operation(one: list[_Operation], other: list[_Operation]) -> str | None:
    for first, second in zip(one, other, strict=False):
        if first.name != second.name:
            return f"{second.name} where the first run had {first.name}{first.line or second.line}"
        same_inputs = first_difference(list(first.inputs), list(second.inputs)) is None
        if same_inputs and first_difference(list(first.results), list(second.results)) is not None:
            return f"{first.name}{first.line}"
    return None


_HERE = Path(__file__).resolve()
_OURS = _HERE.parent.parent.parent
_FOLDERS = [_OURS / folder for folder in ("core", "steps", "state", "devices")]
_TORCH = Path(torch.__file__).resolve().parent


def _users_line() -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path == _HERE and frame.name == "run":
            break  # what lies further out called us, and did nothing of the step
        if path.suffix == ".py" and not any(folder in path.parents for folder in (*_FOLDERS, _TORCH)):
            return f" at {path.name}:{frame.lineno}: {frame.line}"
    return ""
