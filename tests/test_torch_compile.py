"""The second route: a user's own ``torch.compile(step, fullgraph=True)``."""

import pytest
import torch

import purestep as ps

from toys import differing, mlp, mlp_step, rows_of, toy_state, toy_step


@pytest.fixture(autouse=True)
def dynamo():
    import torch._dynamo as dynamo

    if not hasattr(dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch cannot trace autograd.grad")
    dynamo.reset()
    dynamo.utils.counters.clear()  # not part of a reset: graphs of other tests would count
    with dynamo.config.patch(trace_autograd_ops=True):
        yield dynamo
    dynamo.reset()


def test_keyed_modules_draw_what_plain_ones_draw():
    model, batch = mlp(dropout=0.4), rows_of(10)
    plain, keyed = mlp_step(model, split=2), mlp_step(ps.keyed_modules(model), split=2)
    state = ps.init(model, plain)
    assert differing(plain(state, batch), keyed(state, batch)) == []


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize(("kind", "shape"), [
    (torch.nn.Dropout, (4, 3)), (torch.nn.Dropout1d, (4, 3, 5)), (torch.nn.Dropout2d, (4, 3, 5, 2)),
    (torch.nn.Dropout3d, (2, 3, 2, 2, 2)),
])  # fmt: skip
def test_each_keyed_dropout_has_the_bits_of_its_plain_form(kind, shape, p):
    x = torch.randn(shape)
    results = []
    for module in (kind(p), ps.keyed_modules(kind(p))):
        forward = ps.forward(lambda m, x, key: ps.Loss((m(x) * torch.arange(x.numel()).view(x.shape)).sum(), 1), module)
        results.append(forward({}, x, ps.random_key(1)).total)
    assert torch.equal(*results)


def test_the_step_is_one_graph_with_the_eager_bits(dynamo):
    model, batches = mlp(dropout=0.4, norm=True), [rows_of(10, seed=i) for i in range(3)]
    step = mlp_step(ps.keyed_modules(model), split=2)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    one = other = ps.init(model, step)
    for batch in batches:
        one, metrics = step(one, batch)
        other, others = compiled(other, batch)
        assert differing((one, metrics), (other, others)) == []
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_plain_dropout_is_refused_by_name():
    model = mlp(dropout=0.4)
    step = mlp_step(model)
    state = ps.init(model, step)
    with pytest.raises(Exception, match=r"module 3 \(Dropout\).*ps\.keyed_modules"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(state, rows_of(4))
    step(state, rows_of(4))


def test_without_the_switch_the_error_names_it(dynamo):
    step = toy_step()
    with dynamo.config.patch(trace_autograd_ops=False), pytest.raises(Exception, match="trace_autograd_ops"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(toy_state(step), torch.ones(2, dtype=torch.float64))


def test_modules_without_a_keyed_form_are_refused():
    with pytest.raises(ps.RandomOpError, match="AlphaDropout has no keyed module"):
        ps.keyed_modules(torch.nn.Sequential(torch.nn.AlphaDropout(0.1)))
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1.0"):
        ps.KeyedDropout(1.0)
