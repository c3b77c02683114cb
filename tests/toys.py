"""Small models, losses and batches that the tests share."""

import torch
from torch import nn
from torch.nn import functional

import purestep as ps
from purestep.state.tree import leaves_with_paths


def toy_loss(w, x, key):
    """Toy model T: one weight, loss ``sum(w * x)`` with its rows, so that the gradient is ``mean(x)``."""
    return ps.Loss((w * x).sum(), weight=len(x))


def toy_step(lr=1.0, *extra, split=None, order="tree"):
    head = () if split is None else (ps.split_batch(split),)
    return ps.compose(*head, ps.forward(toy_loss), ps.backward(), ps.accumulate(order), *extra, ps.step(ps.sgd(lr)))


def toy_state(step, dtype=torch.float64, seed=0):
    return ps.init(torch.zeros((), dtype=dtype), step, seed=seed)


def classifier_loss(model, batch, key):
    """Cross entropy summed over the rows that have a label (not -100), weighted by how many these are."""
    x, y = batch
    logits = model(x)
    total = functional.cross_entropy(logits, y, reduction="sum", ignore_index=-100)
    valid = y != -100
    right = ((logits.argmax(-1) == y) & valid).sum()
    return ps.Loss(total, weight=valid.sum(), metrics={"accuracy": ps.Sum(right, valid.sum())})


def mlp(dropout=0.0, dtype=torch.float32, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(dtype)


def rows_of(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (count,), generator=generator)


def mlp_step(model, *, split=None, order="tree", clip=True, optimizer=None, buffers="mean", unroll=4):
    head = () if split is None else (ps.split_batch(split),)
    middle = (ps.clip(max_norm=1.0),) if clip else ()
    tx = ps.adamw(ps.warmup_cosine(peak=1e-2, warmup=3, total=20)) if optimizer is None else optimizer
    return ps.compose(
        *head,
        ps.forward(classifier_loss, model),
        ps.backward(),
        ps.accumulate(order, buffers=buffers, unroll=unroll),
        *middle,
        ps.step(tx),
    )


def snapshot(tree):
    """Copies of all tensor leaves by path."""
    return {path: leaf.clone() for path, leaf in leaves_with_paths(tree, "tree") if isinstance(leaf, torch.Tensor)}


def differing(one, other):
    """Paths of the leaves whose bits differ (NaN equals NaN)."""
    a, b = snapshot(one), snapshot(other)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return [path for path in a if not same_bits(a[path], b[path])]


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def ulps(a, b):
    """The largest distance between two float tensors of one dtype, in units in the last place of the larger value."""
    a, b = a.detach(), b.detach()
    spacing = torch.nextafter(torch.maximum(a.abs(), b.abs()), torch.full_like(a, float("inf"))) - torch.maximum(
        a.abs(), b.abs()
    )
    return float(((a - b).abs() / spacing).max()) if a.numel() else 0.0
