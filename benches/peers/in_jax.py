"""JAX with optax: the whole step jitted, its state donated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax import lax

from workloads import CLIP, DECAY, RATE

__all__ = ["prepare", "prepare_stacked", "scanned", "step_of"]


def step_of(workload):
    """``step(batch) -> loss`` in JAX, from the same first values; batches come from :func:`prepare`."""
    state, update = _start(workload)
    held = [state]

    jitted = jax.jit(update, donate_argnums=0)

    def step(batch):
        held[0], loss = jitted(held[0], batch)
        return loss

    return step


def scanned(workload):
    """The same with several whole steps in one call: ``steps(batches) -> last loss``, batches from ``prepare_stacked``."""
    state, update = _start(workload)
    held = [state]
    jitted = jax.jit(lambda state, batches: lax.scan(update, state, batches), donate_argnums=0)

    def steps(batches):
        held[0], losses = jitted(held[0], batches)
        return losses[-1]

    return steps


def prepare(batch):
    """A batch of torch tensors as JAX arrays; pictures with their channels last, which XLA's convolutions want."""
    x, y = (jnp.asarray(leaf.numpy()) for leaf in batch)
    return (jnp.moveaxis(x, -3, -1) if x.ndim >= 4 else x), y


def prepare_stacked(batches):
    """Several batches along a new dimension 0, as ``lax.scan`` wants them."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(prepare(batch) for batch in batches))


def _start(workload):
    module = workload.make()
    params = {name: _array(value) for name, value in module.named_parameters()}
    stats = {name: _array(value) for name, value in module.named_buffers() if "running" in name}
    forward = _FORWARDS[type(module).__name__]
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY))

    def loss_fn(params, stats, batch):
        x, y = batch
        logits, stats = forward(params, stats, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), stats

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def update(state, batch):
        params, stats, opt_state = state
        (loss, stats), grads = _accumulated(gradient, params, stats, batch, workload.micro)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return (params, stats, optimizer.init(params)), update


def _accumulated(gradient, params, stats, batch, micro):
    if micro == 1:
        return gradient(params, stats, batch)
    parts = jax.tree.map(lambda leaf: leaf.reshape(micro, -1, *leaf.shape[1:]), batch)

    def one(carry, part):
        (loss, _), grads = gradient(params, stats, part)
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = lax.scan(one, zero, parts)
    return (loss / micro, stats), jax.tree.map(lambda grad: grad / micro, grads)


def _array(value: torch.Tensor):
    array = np.array(value.detach())
    return jnp.asarray(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array)


def _linear(params, name, x):
    out = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return out if bias is None else out + bias


def _sequential(params, stats, x):
    names = sorted({name.rsplit(".", 1)[0] for name in params}, key=int)
    for name in names[:-1]:
        x = jax.nn.relu(_linear(params, name, x))
    return _linear(params, names[-1], x), stats


def _deep(params, stats, x):
    layers = sum(name.endswith("weight") for name in params) - 1
    for i in range(layers):
        x = x + layers**-0.5 * jnp.tanh(_linear(params, f"layers.{i}", x))
    return _linear(params, "head", x), stats


def _res_net(params, stats, x):
    stats = dict(stats)

    def conv(name, x):
        return lax.conv_general_dilated(
            x, params[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(name, x):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        count = x.size // x.shape[-1]
        for kind, value in (("mean", mean), ("var", var * count / (count - 1))):
            running = f"{name}.running_{kind}"
            stats[running] = 0.9 * stats[running] + 0.1 * value
        return (x - mean) * lax.rsqrt(var + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]

    x = jax.nn.relu(norm("stem_norm", conv("stem", x)))
    for i in range(sum(name.endswith("conv1.weight") for name in params)):
        block = f"blocks.{i}"
        inner = jax.nn.relu(norm(f"{block}.norm1", conv(f"{block}.conv1", x)))
        x = jax.nn.relu(x + norm(f"{block}.norm2", conv(f"{block}.conv2", inner)))
    return _linear(params, "head", x.mean((1, 2))), stats


def _layer_norm(params, name, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def _gpt(params, stats, tokens, heads=4):
    rows, length = tokens.shape
    x = params["token.weight"][tokens] + params["place.weight"][:length]
    for i in range(sum(name.endswith("qkv.weight") for name in params)):
        layer = f"layers.{i}"
        parts = _linear(params, f"{layer}.qkv", _layer_norm(params, f"{layer}.norm1", x))
        q, k, v = jnp.moveaxis(parts.reshape(rows, length, 3, heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + _linear(params, f"{layer}.out", mixed.reshape(rows, length, -1))
        up = jax.nn.gelu(_linear(params, f"{layer}.up", _layer_norm(params, f"{layer}.norm2", x)))
        x = x + _linear(params, f"{layer}.down", up)
    return _linear(params, "head", _layer_norm(params, "norm", x)), stats


def _gru(params, stats, x):
    width = params["gru.weight_hh_l0"].shape[1]
    inputs = jnp.moveaxis(x @ params["gru.weight_ih_l0"].T + params["gru.bias_ih_l0"], 1, 0)
    weight, bias = params["gru.weight_hh_l0"].T, params["gru.bias_hh_l0"]

    def cell(h, row):
        xr, xz, xn = jnp.split(row, 3, -1)
        hr, hz, hn = jnp.split(h @ weight + bias, 3, -1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + r * hn)
        return n + z * (h - n), None

    last, _ = lax.scan(cell, jnp.zeros((x.shape[0], width)), inputs)
    return _linear(params, "head", last), stats


_FORWARDS = {"Sequential": _sequential, "Deep": _deep, "ResNet": _res_net, "Gpt": _gpt, "Gru": _gru}
