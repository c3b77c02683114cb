"""What is done to a graph before Inductor: the same numbers, from fewer and larger operations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep.core.lowering.lift import lift_elementwise
from purestep.core.lowering.numbers import compute_numbers_once
from purestep.core.lowering.packing import plan
from purestep.state.tree import flatten

from toys import classifier_loss, differing, mlp, mlp_step, rows_of, ulps

CPU = ps.devices.cpu()
aten = torch.ops.aten


def recorded(fn, *inputs):
    return make_fx(fn, tracing_mode="fake")(*inputs)


def count(graph, *targets):
    return sum(node.target in targets for node in graph.graph.nodes)


def flat(parts):
    return torch.cat([part.reshape(-1) for part in parts])


shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=2, max_size=6)
programs = st.lists(
    st.sampled_from(["add", "scale", "lerp", "where", "sqrt", "shift", "transposed", "broadcast"]), max_size=6
)


def arithmetic(names, number):
    """A chain of operations on two tensors of one shape: on elements, with a number of the graph, and some that mix."""

    def transposed(a, b):
        return (a.t() * 2).t() if a.dim() == 2 else a * 2

    steps = {
        "add": lambda a, b: a + b,
        "scale": lambda a, b: a * (number + 1).sqrt(),
        "lerp": lambda a, b: torch.lerp(a, b, number),
        "where": lambda a, b: torch.where(number > 0, a, b),
        "sqrt": lambda a, b: (a * a).sqrt() / 0.3,
        "shift": lambda a, b: a - 1,
        "transposed": transposed,
        "broadcast": lambda a, b: a + b.sum(-1, keepdim=True),
    }

    def run(a, b):
        for name in names:
            a = steps[name](a, b)
        return a

    return run


@given(shapes, programs, st.booleans())
def test_lifting_keeps_every_bit(shapes, names, reused):
    """Over leaves of any shapes, whatever is computed of each, and whoever else reads it."""
    generator = torch.Generator().manual_seed(0)
    one, other = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))

    def fn(number, *leaves):
        rule = arithmetic(names, number)
        results = [rule(a, b) for a, b in zip(leaves[: len(one)], leaves[len(one) :], strict=True)]
        first = flat(results)
        extra = [results[0] * 2, flat([result + 1 for result in results])] if reused else []
        return (first, *extra)

    inputs = (torch.tensor(0.7), *one, *other)
    graph = recorded(fn, *inputs)
    expected = graph(*inputs)
    compute_numbers_once(graph.graph)
    lift_elementwise(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert all(torch.equal(a, b) for a, b in zip(expected, graph(*inputs), strict=True))


@pytest.mark.parametrize("leaves", [3, 12])
def test_lifted_arithmetic_does_not_grow_with_the_leaves(leaves):
    def fn(number, *xs):
        return flat([torch.lerp(x * x, x, number) + x.sqrt() for x in xs])

    graph = recorded(fn, torch.tensor(0.5), *(torch.rand(i % 3 + 1, 2) for i in range(leaves)))
    lift_elementwise(graph.graph)
    assert [count(graph, op) for op in (aten.mul.Tensor, aten.lerp.Tensor, aten.sqrt.default)] == [1, 1, 1]


def test_parts_that_are_computed_otherwise_stay_apart():
    def fn(x, y):
        return torch.cat([x * 2, y * 3]), torch.cat([x + 1, y - 1]), torch.cat([x.to(torch.float64), y.double() * 2])

    x, y = torch.rand(3), torch.rand(2)
    graph = recorded(fn, x, y)
    expected = graph(x, y)
    lift_elementwise(graph.graph)
    graph.recompile()
    assert count(graph, aten.mul.Tensor) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, graph(x, y), strict=True))


def test_a_flat_tensor_cut_and_joined_is_itself_only_where_nothing_moved():
    def fn(whole, other):
        a, b, c = whole[:2], whole[2:5], whole[5:]
        return flat([a * 2, b * 2, c * 2]), flat([b * 2, a * 2, c * 2]), flat([a * 2, b * 2]), flat([a, other[2:5], c])

    inputs = torch.rand(6), torch.rand(6)
    graph = recorded(fn, *inputs)
    expected = graph(*inputs)
    lift_elementwise(graph.graph)
    graph.recompile()
    assert all(torch.equal(a, b) for a, b in zip(expected, graph(*inputs), strict=True))
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    assert outputs[0].args[0].op == "placeholder"
    assert outputs[1].args[0].target is aten.cat.default


def test_a_number_that_several_tensors_read_is_stored_once():
    def fn(count, *xs):
        return tuple(x * (1.0 - 0.9 ** count.to(torch.float64)).to(torch.float32) for x in xs)

    inputs = (torch.tensor(3), *(torch.rand(2) for _ in range(5)))
    graph = recorded(fn, *inputs)
    expected = graph(*inputs)
    compute_numbers_once(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert count(graph, aten.pow.Scalar) == 1
    assert sum("realize" in str(node.target) for node in graph.graph.nodes) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, graph(*inputs), strict=True))


def test_constants_are_not_stored():
    graph = recorded(
        lambda x, y: (x * torch.tensor(2.0).sqrt(), y * torch.tensor(2.0).sqrt()), torch.rand(2), torch.rand(2)
    )
    compute_numbers_once(graph.graph)
    assert not any("realize" in str(node.target) for node in graph.graph.nodes)


def packed_state(**options):
    step = mlp_step(mlp(**options))
    state = ps.init(mlp(**options), step)
    values, treedef = flatten(state)
    return values, treedef.paths(), plan(values, treedef.paths(), range(len(values)))


def test_small_siblings_of_one_dtype_are_packed_and_nothing_else():
    values, paths, packing = packed_state(norm=True)
    groups = [{paths[i][:-1] for i in group.members} for group in packing.groups]
    assert groups == [{("params",)}, {("opt_state", 1)}, {("opt_state", 2)}]
    packed = {i for group in packing.groups for i in group.members}
    assert packed.isdisjoint(packing.alone)
    assert packed | set(packing.alone) == set(range(len(values)))
    assert all(values[i].dim() for i in packed)


def test_packed_leaves_are_views_with_the_same_values_and_no_memory_of_the_old_ones():
    values, _, packing = packed_state()
    leaves, inputs = packing.pack(values)
    assert all(torch.equal(a, b) for a, b in zip(values, leaves, strict=True))
    for group, whole in zip(packing.groups, inputs[len(packing.alone) :], strict=True):
        whole.fill_(7.0)
        assert all((leaves[i] == 7.0).all() for i in group.members)
        assert not any((values[i] == 7.0).any() for i in group.members)


def test_large_leaves_and_other_layouts_stay_alone():
    leaves = [torch.zeros(4, 4) for _ in range(5)] + [torch.zeros(1 << 16), torch.zeros(3, 5).t(), torch.zeros(())]
    packing = plan(leaves, [("params", i) for i in range(len(leaves))], range(len(leaves)))
    assert packing.alone == (5, 6, 7)


def deep_step(freeze=False):
    """Six small layers with BatchNorm and dropout, float64 beside float32, a frozen leaf, and a leaf without a gradient."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(3) for layer in (torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2))
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(6, 3))
    model[0].bias.requires_grad_(not freeze)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(4)))
    return ps.compose(
        ps.forward(classifier_loss, model),
        ps.backward(),
        ps.accumulate(),
        ps.clip(max_norm=0.1),
        ps.step(ps.adamw(ps.linear(1e-2, 1e-3, 10))),
    ), model


@pytest.mark.inductor
@pytest.mark.parametrize("freeze", [False, True])
def test_a_packed_state_trains_as_one_that_is_not(freeze):
    step, model = deep_step(freeze)
    packed = unpacked = ps.init(model, step)
    packed = ps.copy_state(packed)
    donating, plain = (ps.jit(step, device=CPU, donate=donate) for donate in (True, False))
    for i in range(4):
        packed, metrics = donating(packed, rows_of(8, seed=i))
        unpacked, expected = plain(unpacked, rows_of(8, seed=i))
        assert ulps(metrics["loss"], expected["loss"]) <= 8
    torch.testing.assert_close(packed.params, unpacked.params, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.opt_state.nu, unpacked.opt_state.nu, rtol=1e-4, atol=1e-9)
    assert torch.equal(packed.params["unused"], torch.ones(4))
    storages = {leaf.untyped_storage().data_ptr() for leaf in packed.params.values()}
    assert len(storages) < len(packed.params)


@pytest.mark.inductor
def test_a_record_made_from_a_packed_state_goes_on_and_takes_its_relatives_with_it():
    step, model = deep_step()
    fast = ps.jit(step, device=CPU, donate=True)
    state, _ = fast(ps.init(model, step), rows_of(8))
    kept = ps.copy_state(state)
    relative = state.replace(counters=state.counters)
    after, _ = fast(relative, rows_of(8, seed=1))
    with pytest.raises(ps.DonatedError):
        _ = state.params
    again, _ = fast(kept, rows_of(8, seed=1))
    assert differing(after, again) == []
    assert fast.compiles == 1


@pytest.mark.inductor
def test_a_batch_that_is_a_view_of_a_packed_leaf_is_refused():
    step, model = deep_step()
    fast = ps.jit(step, device=CPU, donate=True)
    state, _ = fast(ps.init(model, step), rows_of(6))
    lent = state.params["0.weight"]
    with pytest.raises(ps.BatchError, match="shares its storage"):
        fast(state, (lent, torch.zeros(6, dtype=torch.int64)))
    fast(state, rows_of(6))


def lowered(fn, *inputs):
    """What a function gives before and after its graph is rewritten."""
    graph = recorded(fn, *inputs)
    expected = graph(*inputs)
    compute_numbers_once(graph.graph)
    lift_elementwise(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return expected, graph(*inputs)


def rows_joined(matrix):
    return flat([matrix[:2] * 2, matrix[2:] * 2])


UNLIKE = {
    "an int and a float": lambda n, x, y: (torch.stack([(n + 1).to(torch.float64), n + 1.5]), n + 1, n + 1.0, n * True),
    "two zeros": lambda n, x, y: (n.double().mul(-0.0), n.double().mul(0.0)),
    "zeros over leaves": lambda n, x, y: (flat([torch.copysign(x, 0.0), torch.copysign(y, -0.0)]),),
    "every other element": lambda n, x, y: (flat([x[0:4:2] * 2, x[4:8:2] * 2]),),
    "rows of a matrix": lambda n, x, y: (flat([row * 2 for row in x.view(4, 2).split(2)]), rows_joined(x.view(4, 2))),
    "numbers side by side": lambda n, x, y: (torch.cat([(n * 2).reshape(-1), (n * 2).reshape(-1)]),),
    "one number twice": lambda n, x, y: (torch.cat([(n * 2).reshape(-1)] * 2),),
    "other numbers side by side": lambda n, x, y: (torch.cat([(n * 2).reshape(-1), (n * 2 + 1).reshape(-1)]),),
    "operands of other dtypes": lambda n, x, y: (flat([x * y.double(), x.double() * y]), flat([x * n, y * n])),
    "integers beside floats": lambda n, x, y: (flat([x + y, x + (y * 1e9).long()]),),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_looks_alike_keeps_its_bits_and_its_dtype(name):
    expected, found = lowered(UNLIKE[name], torch.tensor(3), torch.randn(8), torch.randn(8))
    for a, b in zip(expected, found, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
        assert torch.equal(torch.signbit(a), torch.signbit(b))
