"""Gradients are right with params other than the module's own, whatever the module does to compute them."""

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.checkpoint import checkpoint

import purestep as ps

from strategies import seeds
from toys import differing, same_bits


class LegacySquare(torch.autograd.Function):
    """The old style: forward with a context, as most custom functions in the field are written."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.drop = nn.Dropout(0.4)

    def block(self, x):
        return self.drop(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def forward(self, x):
        return self.block(x)


class Checkpointed(Plain):
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Reentrant(Plain):
    def forward(self, x):
        return checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=True)


class TwoCheckpoints(Plain):
    """Random operations before, between and after the recomputed parts."""

    def forward(self, x):
        x = checkpoint(lambda y: self.drop(self.first(self.drop(y))), x, use_reentrant=False)
        x = self.drop(torch.tanh(x))
        return self.drop(checkpoint(lambda y: self.drop(self.second(y)), x, use_reentrant=False))


class TwoPlain(TwoCheckpoints):
    def forward(self, x):
        x = self.drop(self.first(self.drop(x)))
        x = self.drop(torch.tanh(x))
        return self.drop(self.drop(self.second(x)))


class Legacy(Plain):
    def block(self, x):
        return LegacySquare.apply(self.second(self.first(x)))


class Hooked(Plain):
    """A full backward hook that doubles the gradient of the first layer's input, and a forward hook."""

    def __init__(self):
        super().__init__()
        self.drop.p = 0.0
        self.second.register_full_backward_hook(lambda m, gin, gout: (gin[0] * 2,))
        self.first.register_forward_hook(lambda m, args, out: out + 1)


class Shared(nn.Module):
    """One submodule under two names."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = self.left
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.right(torch.tanh(self.left(x))))


class Tied(nn.Module):
    """An embedding tied to the output layer (case 65)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))


def summed(model, x, key):
    return ps.Loss((model(x) ** 3).sum(), weight=len(x))


def other_params(model):
    """Params that differ from the module's own, so that a use of its own weights shows."""
    torch.manual_seed(5)
    return {name: p.detach() * 1.7 + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}


def reference(model, params, x):
    """Torch's own gradients, of a copy of the module that holds these params."""
    import copy

    own = copy.deepcopy(model)
    own.load_state_dict(params, strict=False)
    (own(x) ** 3).sum().backward()
    return {name: p.grad for name, p in own.named_parameters()}


@pytest.mark.parametrize("kind", [Plain, Checkpointed, Legacy, Hooked, Shared])
@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_gradients_equal_torchs_own(kind, backend):
    torch.manual_seed(0)
    model = kind().double()
    if hasattr(model, "drop"):
        model.drop.p = 0.0
    x = torch.randn(6, 4, dtype=torch.float64)
    params = other_params(model)
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(model, step).replace(params=params)
    run = step if backend == "none" else ps.jit(step, device=ps.devices.cpu(), backend=backend)
    new, _ = run(state, x)
    expected = reference(model, params, x)
    for name, p in params.items():
        torch.testing.assert_close(new.params[name], p - expected[name] / 6, rtol=1e-12, atol=1e-13)


def test_the_reentrant_checkpoint_is_refused_by_torch_and_the_state_still_works():
    model = Reentrant()
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(model, step)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        step(state, torch.ones(2, 4))
    assert int(state.counters.updates) == 0


@given(seeds)
def test_a_checkpointed_block_recomputes_with_the_same_masks(seed):
    """The bits of the step are those of the same module without checkpoints, dropout included."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    for one, other in ((Plain, Checkpointed), (TwoPlain, TwoCheckpoints)):
        model = one()
        results = []
        for kind in (one, other):
            copy = kind()
            copy.load_state_dict(model.state_dict())
            step = ps.compose(ps.forward(summed, copy), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
            results.append(step(ps.init(copy, step, seed=seed), x)[0].params)
        assert differing(*results) == []


@pytest.mark.parametrize("kind", [Checkpointed, TwoCheckpoints])
def test_a_traced_checkpoint_recomputes_with_the_same_masks(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 4)
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(model, step)
    traced = ps.jit(step, device=ps.devices.cpu(), backend="aot_eager")
    assert differing(step(state, x)[0], traced(state, x)[0]) == []


def test_the_module_sees_the_values_of_the_state_and_not_its_own():
    model = nn.Linear(1, 1, bias=False)
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.0)))
    state = ps.init(model, step).replace(params={"weight": torch.tensor([[2.0]])})
    assert float(step(state, torch.ones(1, 1))[1]["loss"]) == 8.0


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_tied_weights_are_one_leaf_with_the_sum_of_both_gradients(backend):
    """Case 65."""
    torch.manual_seed(0)
    model = Tied().double()
    x = torch.randint(0, 7, (5, 2))
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.adam(0.1)))
    state = ps.init(model, step)
    assert list(state.params) == ["embed.weight"]
    assert list(state.opt_state.mu) == ["embed.weight"]
    plain = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    before = ps.init(model, plain)
    run = plain if backend == "none" else ps.jit(plain, device=ps.devices.cpu(), backend=backend)
    new, _ = run(before, x)
    (model(x) ** 3).sum().backward()
    torch.testing.assert_close(before.params["embed.weight"] - new.params["embed.weight"], model.embed.weight.grad / 5)
    saved = ps.state_dict(new)
    assert set(saved) == {"embed.weight", "out.weight"}
    model.load_state_dict(saved)
    assert model.out.weight is model.embed.weight


def test_loading_keeps_the_tie_and_refuses_values_that_untie_it():
    model = Tied()
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(model, step)
    values = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    loaded = ps.load_state_dict(state, values)
    assert list(loaded.params) == ["embed.weight"]
    assert same_bits(loaded.params["embed.weight"], values["out.weight"])
    with pytest.raises(ps.StateError, match=r"out\.weight and embed\.weight are one tied leaf"):
        ps.load_state_dict(state, {**values, "out.weight": values["out.weight"] + 1})


def test_frozen_parameters_stay_out_of_gradient_and_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    step = ps.compose(
        ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.adamw(0.1, weight_decay=0.5))
    )
    state = ps.init(model, step)
    assert state.opt_state.mu["0.weight"] is None
    sums = step.phases[0].local(state, torch.ones(2, 4))
    assert sums.grads["0.weight"] is None
    assert sums.grads["1.weight"] is not None
    new, _ = step(state, torch.ones(2, 4))
    assert sorted(path for path in differing(state.params, new.params)) == ["tree['1.bias']", "tree['1.weight']"]
    assert new.params["0.weight"] is state.params["0.weight"]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_an_unused_parameter_is_left_alone():
    """Case 73: no gradient is not a zero gradient."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    model = Half()
    step = ps.compose(
        ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.adamw(0.1, weight_decay=0.5))
    )
    state = ps.init(model, step)
    new, _ = step(state, torch.ones(2, 4))
    changed = differing(state.params, new.params)
    assert changed == ["tree['used.bias']", "tree['used.weight']"]


def test_batch_norm_is_pure_and_follows_the_stated_rule():
    """Case 66: with momentum 0.1 two halves give 0.19 of the mean one after the other, 0.1 from the opening buffers."""
    model = nn.BatchNorm1d(2).double()
    x = torch.tensor([[1.0, 3.0]] * 2 + [[3.0, 5.0]] * 2, dtype=torch.float64)
    x = torch.cat([x, x])
    mean = x.mean(0)

    def run(rule, split=2):
        step = ps.compose(
            ps.split_batch(split), ps.forward(summed, model), ps.backward(), ps.accumulate(buffers=rule),
            ps.step(ps.sgd(0.0)),
        )  # fmt: skip
        return step(ps.init(model, step), x)[0].buffers

    opening, follow, kept = (run(rule) for rule in ("mean", "sequential", "keep"))
    torch.testing.assert_close(opening["running_mean"], 0.1 * mean)
    torch.testing.assert_close(follow["running_mean"], 0.19 * mean)
    torch.testing.assert_close(kept["running_mean"], torch.zeros(2, dtype=torch.float64))
    counts = [int(buffers["num_batches_tracked"]) for buffers in (opening, follow, kept)]
    assert counts == [1, 2, 0]
    assert torch.equal(model.running_mean, torch.zeros(2, dtype=torch.float64))
    mixed = run({"*": "keep", "running_*": "mean"})
    assert int(mixed["num_batches_tracked"]) == 0
    torch.testing.assert_close(mixed["running_mean"], 0.1 * mean)


def test_one_microbatch_gives_the_modules_own_buffers_to_the_bit():
    torch.manual_seed(0)
    model, x = nn.BatchNorm1d(5), torch.randn(7, 5)
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.0)))
    new, _ = step(ps.init(model, step), x)
    model(x)
    for name, buffer in model.named_buffers():
        assert same_bits(new.buffers[name], buffer)


def test_a_buffer_that_is_replaced_rather_than_written_is_seen():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + x.mean()
            return self.w * x

    model = Replacing()
    step = ps.compose(ps.forward(summed, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.0)))
    state, _ = step(ps.init(model, step), torch.full((4,), 3.0))
    state, _ = step(state, torch.full((4,), 3.0))
    assert float(state.buffers["seen"]) == 6.0
    assert float(model.seen) == 0.0


def test_complex_parameters_train_as_in_torch():
    torch.manual_seed(0)
    w = torch.randn(3, dtype=torch.complex128)
    x = torch.randn(3, dtype=torch.complex128)

    def loss(w, x, key):
        return ps.Loss((w * x).abs().pow(2).sum(), weight=1)

    step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
    new, _ = step(ps.init(w, step), x)
    own = w.clone().requires_grad_()
    (own * x).abs().pow(2).sum().backward()
    torch.testing.assert_close(new.params, w - 0.1 * own.grad)


def test_sparse_gradients_work_eagerly_and_are_refused_by_jit():
    model = nn.Embedding(6, 2, sparse=True)
    dense = nn.Embedding.from_pretrained(model.weight.detach().clone(), freeze=False)
    batch = torch.tensor([1, 1, 4])
    results = []
    for part in (model, dense):
        step = ps.compose(
            ps.split_batch(2), ps.forward(summed, part), ps.backward(), ps.accumulate(), ps.clip(max_norm=0.5),
            ps.step(ps.sgd(0.1, momentum=0.9)),
        )  # fmt: skip
        results.append(step(ps.init(part, step), batch)[0].params["weight"])
        if part is model:
            fast = ps.jit(step, device=ps.devices.cpu(), backend="aot_eager")
            with pytest.raises(ps.TraceError, match=r"weight.*sparse"):
                fast(ps.init(part, step), batch)
    torch.testing.assert_close(*results)
