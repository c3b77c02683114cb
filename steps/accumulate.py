"""The accumulate concern: fold the sums of the microbatches, divide once by the summed weight."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor

from ..state.errors import LossError
from ..state.sums import Sum, Sums
from ..state.torch_private import is_tracing
from ..state.tree import Tree, fill, map_leaves
from .buffers import buffer_mean, buffer_sum
from .concern import Stateless
from .fold_rows import fold_rows
from .split_batch import stacked

__all__ = ["Accumulate", "accumulate", "add_sums"]

Order = Literal["tree", "fold"]
Rule = Literal["mean", "sequential", "keep"]
Local = Callable[[Tree, Any, Tensor, dict[str, Tensor]], Sums]

UNROLLED = 4  # beyond this many microbatches one traced body in a loop compiles faster, and runs no slower


def accumulate(
    order: Order = "tree", *, buffers: Rule | Mapping[str, Rule] = "mean", unroll: int = UNROLLED
) -> Accumulate:
    r"""Fold the microbatches' sums and divide once: :math:`\sum_i g_i / \sum_i w_i`.

    Args:
        order: ``"tree"`` adds in a fixed pairwise tree over the global microbatch index, so that the bits do not depend
            on how the microbatches are spread over processes or calls; ``"fold"`` adds one after the other, with one
            partial sum instead of :math:`\log_2 K` and without that promise.
        buffers: what becomes of the module's buffers, for all or by name pattern. ``"mean"``: each microbatch starts from
            the update's opening buffers and the result is their weighted mean, counters once up. ``"sequential"``:
            each starts where the one before ended, as in torch, without the promise about the spread. ``"keep"``: they
            stay as they were.
        unroll: more microbatches than this become a loop in a traced graph.

    Returns:
        A concern, to be called as ``list of Sums -> Sums``, with ``divide(Sums) -> gradients``.

    Raises:
        ValueError: if ``order`` or a rule is unknown, or ``unroll`` is not positive.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> gradient, fold = ps.backward(), ps.accumulate()
        >>> parts = [gradient(ps.forward(loss), torch.tensor(0.0), x) for x in (torch.ones(4), torch.tensor([4.0]))]
        >>> fold.divide(fold(parts))  # 8 / 5, where a mean of means gives 2.5
        tensor(1.6000)
    """
    if order not in ("tree", "fold"):
        raise ValueError(f'order must be "tree" or "fold", got {order!r}')
    rules = {"*": buffers} if isinstance(buffers, str) else dict(buffers)
    for pattern, rule in rules.items():
        if rule not in ("mean", "sequential", "keep"):
            raise ValueError(f'buffers[{pattern!r}] must be "mean", "sequential" or "keep", got {rule!r}')
    if unroll < 1:
        raise ValueError(f"unroll must be positive, got {unroll}")
    return Accumulate(order, tuple(rules.items()), unroll)


@attrs.frozen
class Accumulate(Stateless):
    """A fold over microbatches; see :func:`accumulate`."""

    takes: ClassVar[str] = "sums"
    gives: ClassVar[str] = "grads"

    order: Order
    rules: tuple[tuple[str, Rule], ...]
    unroll: int

    def __call__(self, parts: Sequence[Sums]) -> Sums:
        """The sum of the parts, in the chosen order.

        Raises:
            ValueError: if there are no parts.
        """
        if not parts:
            raise ValueError("accumulate: there are no microbatches to add")
        stack: list[Sums | None] = []
        for index, part in enumerate(parts):
            self._push(stack, part, index)
        return _collapse(stack)

    def local(
        self, one: Local, params: Tree, microbatches: list[Any], keys: Tensor, buffers: Mapping[str, Tensor]
    ) -> Sums:
        """The sums of one process's microbatches.

        Args:
            one: ``(params, microbatch, key, buffers) -> Sums``, closing over no tensor.
            params: tree of tensors.
            microbatches: in order.
            keys: one per microbatch, int64 of shape (K, 2).
            buffers: the update's opening buffers.
        """
        stack: list[Sums | None] = []
        current, done = dict(buffers), 0
        if is_tracing() and len(microbatches) > self.unroll:
            stack, current, done = self._looped(one, params, microbatches, keys, current)
        for index, microbatch in enumerate(microbatches[done:], start=done):
            part = one(params, microbatch, keys[index], current)
            current = self._next_buffers(part, current)
            self._push(stack, part, index)
        return self._with_last_buffers(_collapse(stack), buffers, current)

    def divide(self, sums: Sums) -> Tree:
        """The gradients: each sum divided by the weight, in at least 32 bits; absent ones stay absent."""
        return map_leaves(lambda total: Sum(total, sums.weight).mean(), sums.grads)

    def divide_buffers(self, sums: Sums, opening: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers after the update; the opening ones where all weights are zero."""
        return {name: self._after(name, sums, buffer) for name, buffer in opening.items()}

    def _after(self, name: str, sums: Sums, buffer: Tensor) -> Tensor:
        if self._rule(name) == "keep":
            return buffer
        return buffer_mean(sums.buffers[name], buffer, sums.weight)

    def _rule(self, name: str) -> Rule:
        for pattern, rule in reversed(self.rules):
            if pattern in ("*", name) or fnmatch.fnmatchcase(name, pattern):
                return rule
        return "mean"

    def _next_buffers(self, sums: Sums, opening: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the next microbatch starts from."""
        follow = [name for name in opening if self._rule(name) == "sequential"]
        return {**opening, **{name: self._after(name, sums, opening[name]) for name in follow}}

    def _push(self, stack: list[Sums | None], part: Sums, index: int) -> None:
        """Add a part as a binary counter adds one: two sums of equally many microbatches become one."""
        level = 0
        while self.order == "tree" and index >> level & 1:
            part = add_sums(_there(stack[level]), part)
            stack[level] = None
            level += 1
        if self.order == "fold" and stack:
            part = add_sums(_there(stack[0]), part)
        stack.extend([None] * (level + 1 - len(stack)))
        stack[level] = part

    def _with_last_buffers(self, sums: Sums, opening: Mapping[str, Tensor], last: dict[str, Tensor]) -> Sums:
        follow = [name for name in last if self._rule(name) == "sequential"]
        ends = {name: buffer_sum(last[name], opening[name], sums.weight) for name in follow}
        return sums.replace(buffers={**sums.buffers, **ends})

    def _looped(
        self, one: Local, params: Tree, microbatches: list[Any], keys: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[list[Sums | None], dict[str, Tensor], int]:
        """As many leading microbatches as are alike, as one loop in the graph: counter, buffers, how many."""
        alike = stacked(microbatches) or stacked(microbatches[:-1])
        if alike is None:
            return [], buffers, 0
        rows, rebuild = alike
        follow = [name for name in buffers if self._rule(name) == "sequential"]

        def body(given: Tree, row: list[Tensor], carried: list[Tensor]) -> tuple[Sums, list[Tensor]]:
            opening = {**given[1], **dict(zip(follow, carried, strict=True))}
            part = one(given[0], rebuild(row[1:]), row[0], opening)
            after = self._next_buffers(part, opening)
            return part, [after[name] for name in follow]

        columns = [keys[: len(rows)], *(torch.stack(column) for column in zip(*rows, strict=True))]
        carried = [buffers[name] for name in follow]
        stack, last = fold_rows(body, (params, buffers), columns, carried, pairwise=self.order == "tree")
        return stack, {**buffers, **dict(zip(follow, last, strict=True))}, len(rows)


def add_sums(one: Sums, other: Sums) -> Sums:
    """Leaf by leaf; a gradient that only one of them has is taken as it is.

    Raises:
        LossError: if their metrics differ in name or shape.
    """
    _refuse_other_names(one, other)
    grads = fill(fill(map_leaves(torch.add, one.grads, other.grads), one.grads), other.grads)
    rest = map_leaves(torch.add, one.replace(grads=None), other.replace(grads=None))
    return rest.replace(grads=grads)  # type: ignore[no-any-return]


def _refuse_other_names(one: Sums, other: Sums) -> None:
    forms = [{name: tuple(metric.total.shape) for name, metric in sums.metrics.items()} for sums in (one, other)]
    if forms[0] != forms[1]:
        differing = sorted(dict(forms[0].items() ^ forms[1].items()))
        raise LossError(
            f"the loss gives one microbatch other metrics than the next: {', '.join(differing)} (of shapes {forms[0]} and "
            f"{forms[1]}). Return the same names from every microbatch, with ps.Sum(0.0, 0) where there is nothing to count"
        )


def _there(sums: Sums | None) -> Sums:
    assert sums is not None
    return sums


def _collapse(stack: list[Sums | None]) -> Sums:
    """What is left of a binary counter, from the newest to the oldest."""
    total: Sums | None = None
    for part in stack:
        if part is not None:
            total = part if total is None else add_sums(part, total)
    return _there(total)
