"""The backward concern: from a loss to the sums of its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from ..state.errors import BatchError, LossError, TraceError
from ..state.sums import Loss, Sum, Sums, widen
from ..state.torch_private import is_tracing
from ..state.tree import Tree, TreeDef, flatten, map_leaves, unflatten
from .buffers import buffer_sum
from .concern import Stateless
from .split_batch import rows

__all__ = ["Backward", "backward"]


def backward() -> Backward:
    r"""Differentiate the loss: :math:`(\theta, x, k) \mapsto \sum_i \partial \ell_i / \partial \theta` and the other sums.

    Uses reverse mode on detached leaves; no ``requires_grad`` flag of the params is read or written, and only the
    trainable leaves are differentiated. A leaf the loss does not use gets ``None``, which is not the same as zero.

    Returns:
        A concern, to be called as ``(loss_fn, params, microbatch, key) -> Sums``.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> sums = ps.backward()(ps.forward(loss), torch.tensor(0.0), torch.tensor([1.0, 3.0]))
        >>> float(sums.grads), int(sums.weight)
        (4.0, 2)
    """
    return Backward()


@attrs.frozen(eq=False)
class Backward(Stateless):
    """Reverse-mode differentiation; see :func:`backward`."""

    takes: ClassVar[str] = "loss"
    gives: ClassVar[str] = "sums"

    def __call__(
        self,
        loss_fn: Callable[..., Loss],
        params: Tree,
        microbatch: Any = None,
        key: Tensor | None = None,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        carry: Tree = None,
    ) -> Sums:
        """The sums of one microbatch.

        Args:
            loss_fn: a ``forward``, or any function ``(params, microbatch, key) -> Loss``.
            params: tree of tensors.
            microbatch: what the loss function takes.
            key: int64 tensor of shape (2,), or ``None`` where nothing is random.
            buffers: the module's buffers by name; not written to.
            carry: the carry of the chunk before.

        Raises:
            LossError: if the loss does not depend on any trainable leaf.
        """
        values, treedef = flatten(params)
        trainable = _trainable(loss_fn, values, treedef)
        detached = [leaf.detach() for leaf in values]
        inputs = [leaf.requires_grad_() for leaf, wanted in zip(detached, trainable, strict=True) if wanted]
        with torch.enable_grad(), _held(loss_fn, unflatten(treedef, detached), key, buffers) as call:
            loss = call(microbatch, carry)
            grads = iter(_grad(loss, inputs))
        every = [next(grads) if wanted else None for wanted in trainable]
        _refuse_traced_sparse(every, treedef)
        return _sums(loss, unflatten(treedef, every), buffers or {}, microbatch)


def _trainable(loss_fn: Callable[..., Loss], values: list[Tensor], treedef: Any) -> list[bool]:
    rule = getattr(loss_fn, "is_trainable", None)
    if rule is None:
        return [leaf.is_floating_point() or leaf.is_complex() for leaf in values]
    return [rule(path, leaf) for path, leaf in zip(treedef.paths(), values, strict=True)]


@contextlib.contextmanager
def _held(
    loss_fn: Callable[..., Loss], params: Tree, key: Tensor | None, buffers: Mapping[str, Tensor] | None
) -> Iterator[Callable[..., Loss]]:
    """Hold a forward's module bound over the backward: a checkpointed block is computed again there."""
    if hasattr(loss_fn, "bound"):
        with loss_fn.bound(params, key, buffers) as call:
            yield call
    else:
        yield lambda microbatch, carry=None: loss_fn(params, microbatch, key)


def _grad(loss: Loss, inputs: list[Tensor]) -> list[Tensor | None]:
    if not inputs:
        raise LossError("no leaf of the params is trainable: all are frozen or of a dtype without gradients")
    if not loss.total.requires_grad:
        raise LossError(
            "the loss does not depend on the params: its total has no graph. It was detached, computed under no_grad, or "
            "from another module than the one handed to the loss"
        )
    grads = torch.autograd.grad(loss.total, inputs, allow_unused=True)
    if all(grad is None for grad in grads):
        raise LossError(
            "the loss depends on none of the params: it has a graph, but of other tensors. Use the module handed to the "
            "loss, not one it closes over"
        )
    return list(grads)


def _refuse_traced_sparse(grads: list[Tensor | None], treedef: TreeDef) -> None:
    sparse = [i for i, grad in enumerate(grads) if grad is not None and grad.layout != torch.strided]
    if sparse and is_tracing():
        path = treedef.accessors()[sparse[0]].codify("params")
        raise TraceError(
            f"the gradient of {path} is sparse, which a compiled graph cannot hold; build the embedding with sparse=False, "
            "or run the step eagerly"
        )


def _sums(loss: Loss, grads: Tree, buffers: Mapping[str, Tensor], microbatch: Any) -> Sums:
    device = loss.total.device
    weight = loss.weight.to(device)
    after = loss.buffers or {}
    usable = torch.isfinite(weight) & (weight >= 0)
    return Sums(
        map_leaves(widen, grads),
        widen(loss.total.detach()),
        weight,
        {name: Sum(metric.total.to(device), metric.weight.to(device)) for name, metric in loss.metrics.items()},
        {name: buffer_sum(after.get(name, buffer), buffer, weight) for name, buffer in buffers.items()},
        torch.full((), _rows(microbatch), dtype=torch.int64, device=device),
        1 - usable.to(torch.int64),
    )


def _rows(microbatch: Any) -> int:
    try:
        return rows(microbatch)
    except BatchError:  # a loss of no data, or of data without rows: one sample
        return 1
