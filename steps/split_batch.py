"""The split_batch concern: from a batch to microbatches."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import optree
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..state.errors import BatchError
from ..state.tree import NAMESPACE, as_tensors, flatten
from .concern import Stateless

__all__ = ["SplitBatch", "rows", "split_batch"]


def split_batch(count: int | None = None, *, size: int | None = None) -> SplitBatch:
    r"""Cut a batch of n rows into equal microbatches of :math:`\lceil n / K \rceil` rows and one smaller remainder.

    Tensors are cut on their first dimension; a list with one item per row (tensors of different lengths, or dicts of
    tensors) as a list of rows; a ``PackedSequence`` by its sequences; a list or tuple with one string per row as the rows'
    names. Numbers, strings, 0-d tensors and unknown objects are repeated in each part.

    Args:
        count: K, how many microbatches at the most; fewer where the rows run out first.
        size: or the rows of each microbatch.

    Returns:
        A concern, to be called as ``batch -> list of microbatches``.

    Raises:
        ValueError: if not exactly one of ``count`` and ``size`` is given, or it is not a positive int.

    Example:
        >>> import torch, purestep as ps
        >>> [part["x"].tolist() for part in ps.split_batch(2)({"x": torch.arange(3), "scale": 0.5})]
        [[0, 1], [2]]
    """
    if (count is None) == (size is None):
        raise ValueError(f"give either count or size, got count={count!r} and size={size!r}")
    name, value = ("count", count) if size is None else ("size", size)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return SplitBatch(count, size)


@attrs.frozen
class SplitBatch(Stateless):
    """A cut of a batch into microbatches; see :func:`split_batch`."""

    takes: ClassVar[str] = "batch"
    gives: ClassVar[str] = "microbatch"

    count: int | None
    size: int | None

    def __call__(self, batch: Any) -> list[Any]:
        """The microbatches, in order; tensors are views of the batch.

        Raises:
            BatchError: if the batch has no rows, its leaves disagree on how many, it has fewer than K, or a list of numbers
                may be one per row or shared by all.
        """
        batch = as_tensors(batch)
        total = rows(batch)
        if self.count is not None and total < self.count:
            raise BatchError(f"split_batch({self.count}): the batch has {total} rows, fewer than microbatches")
        size = self.size if self.count is None else -(-total // self.count)
        assert size is not None
        if size < total:
            _refuse_ambiguous(batch, total)
        return [take_rows(batch, start, min(start + size, total)) for start in range(0, total, size)]


def rows(batch: Any) -> int:
    """How many rows a batch has: the size that its leaves agree on.

    Raises:
        BatchError: naming the leaves that disagree, or saying that nothing has rows.

    Example:
        >>> import torch
        >>> rows((torch.zeros(3, 2), torch.zeros(3), 0.5))
        3
    """
    flatten(batch)  # registers the records of a kind met for the first time
    seen: list[str] = []
    for is_leaf in (_is_packed, lambda node: _is_packed(node) or _is_row_list(node, batch)):
        paths, values, _ = optree.tree_flatten_with_accessor(batch, is_leaf=is_leaf, namespace=NAMESPACE)
        sizes = {path.codify("batch"): _length(value) for path, value in zip(paths, values, strict=True)}
        counted = {path: size for path, size in sizes.items() if size is not None}
        if len(set(counted.values())) == 1:
            total = next(iter(counted.values()))
            if not total:
                raise BatchError(f"the batch is empty: {', '.join(counted)} has 0 rows")
            return total
        seen.append(", ".join(f"{path} has {size}" for path, size in counted.items()))
    if not seen[0]:
        raise BatchError("the batch has no tensor with rows (a first dimension), so it cannot be counted or split")
    raise BatchError(f"the batch's leaves disagree on the number of rows: {seen[0]}")


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """The part of a batch from row ``start`` up to ``stop``; what has no rows stays whole."""
    total = rows(batch)
    values, treedef = optree.tree_flatten(
        batch, is_leaf=lambda node: _has_rows(node, batch, total), namespace=NAMESPACE
    )
    return treedef.unflatten([_cut(value, start, stop) for value in values])


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def _is_row_list(node: Any, batch: Any) -> bool:
    """A list of like items with tensors may be a list of rows; a tuple, and the batch itself, are columns."""
    if node is batch or type(node) is not list or not node:
        return False
    if all(isinstance(item, Tensor) and not item.dim() for item in node):
        return False  # numbers, which may as well be shared
    forms = [_form(item) for item in node]
    return bool(forms[0][1]) and all(form == forms[0] for form in forms)


def _form(item: Any) -> tuple[Any, tuple[Any, ...]]:
    """Structure, and of each tensor what rows of one column have in common."""
    values, treedef = flatten(item)
    return treedef, tuple((x.dtype, x.dim(), tuple(x.shape[1:])) for x in values if isinstance(x, Tensor))


def _is_column(item: Any, total: int) -> bool:
    """Whether all tensors of an item have as many rows as the batch."""
    sized = [size for size in map(_length, flatten(item)[0]) if size is not None]
    return bool(sized) and all(size == total for size in sized)


def _is_names(node: Any, total: int) -> bool:
    """One string, or list of strings, per row, as torch's loader collates them."""
    if type(node) not in (list, tuple) or len(node) != total:
        return False
    return all(isinstance(leaf, str) for leaf in flatten(list(node))[0])


def _has_rows(node: Any, batch: Any, total: int) -> bool:
    """Whether a node is cut whole: a packed sequence, the rows' names, a list of rows."""
    if _is_packed(node) or _is_names(node, total):
        return True
    return _is_row_list(node, batch) and len(node) == total and not all(_is_column(item, total) for item in node)


def _refuse_ambiguous(batch: Any, total: int) -> None:
    """Refuse a list or tuple of as many items as the batch has rows that may as well be shared by all of them."""

    def is_list(node: Any) -> bool:
        return node is not batch and type(node) in (list, tuple) and len(node) == total > 1

    for node in optree.tree_leaves(batch, is_leaf=is_list, namespace=NAMESPACE):
        if not is_list(node) or _has_rows(node, batch, total):
            continue
        if type(node) is list and _is_row_list(node, batch):
            raise BatchError(
                f"the batch holds a list of {total} tensors of {total} rows each: it may be a list of rows or of columns. "
                "Use a tuple for columns; stack rows of one length into one tensor"
            )
        if not any(_is_column(item, total) for item in node):
            raise BatchError(
                f"the batch holds {total} rows and {node!r}: it may be one item per row or be shared by all. Make a tensor "
                "of it where each row has its own; hand in a tensor of another shape, or a dict, where they share it"
            )


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.dim() else None
    return len(leaf) if isinstance(leaf, (list, tuple)) and leaf else None


def _cut(leaf: Any, start: int, stop: int) -> Any:
    if _length(leaf) is None:
        return leaf
    if isinstance(leaf, PackedSequence):
        return _cut_packed(leaf, start, stop)
    if isinstance(leaf, Tensor) and leaf.layout == torch.sparse_coo:
        return torch.narrow_copy(leaf, 0, start, stop - start)  # a sparse tensor has no views
    return leaf[start:stop]


def _cut_packed(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    sorted_already = packed.sorted_indices is None
    longest = int(lengths[start:stop].max())
    return pack_padded_sequence(
        padded[start:stop, :longest], lengths[start:stop], batch_first=True, enforce_sorted=sorted_already
    )


def stacked(parts: list[Any]) -> tuple[list[list[Tensor]], Any] | None:
    """Tensor leaves per microbatch and what rebuilds one, if all of them have one structure and one set of shapes.

    Returns:
        For each microbatch its tensor leaves in order, and a function from such leaves to a microbatch; ``None`` where
        the microbatches are not alike.
    """
    values, treedef = flatten(parts[0])
    is_tensor = [isinstance(leaf, Tensor) for leaf in values]
    first = _signature(parts[0])
    if any(_signature(part) != first for part in parts[1:]) or not any(is_tensor):
        return None

    def rebuild(tensors: list[Tensor]) -> Any:
        own = iter(tensors)
        return treedef.unflatten(
            [next(own) if wanted else leaf for leaf, wanted in zip(values, is_tensor, strict=True)]
        )

    return [[leaf for leaf in flatten(part)[0] if isinstance(leaf, Tensor)] for part in parts], rebuild


def _signature(part: Any) -> Any:
    values, treedef = flatten(part)
    marks = [(tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), repr(x)) for x in values]
    return treedef, marks
