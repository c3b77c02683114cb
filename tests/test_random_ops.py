"""Random operations of plain torch code: drawn from the key, eager and traced alike, with the right distribution."""

import pytest
import torch
from torch.nn import functional

import purestep as ps
from purestep.state.torch_private import fake_mode, fake_of, trace
from purestep.steps.random_ops import keyed

from toys import same_bits

N = 20_000

# name: draw, then mean and standard deviation of what it draws
DRAWS = {
    "rand": (lambda: torch.rand(N), 0.5, 12**-0.5),
    "rand float64": (lambda: torch.rand(N, dtype=torch.float64), 0.5, 12**-0.5),
    "rand_like": (lambda: torch.rand_like(torch.empty(N)), 0.5, 12**-0.5),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "randn": (lambda: torch.randn(N), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(torch.empty(N)), 0.0, 1.0),
    "normal_": (lambda: torch.empty(N).normal_(2.0, 3.0), 2.0, 3.0),
    "normal of tensors": (lambda: torch.normal(torch.full((N,), 2.0), torch.full((N,), 0.5)), 2.0, 0.5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21**0.5),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), 0.3, 0.21**0.5),
    "bernoulli_ of a tensor": (lambda: torch.empty(N).bernoulli_(torch.full((N,), 0.3)), 0.3, 0.21**0.5),
    "randint": (lambda: torch.randint(2, 12, (N,)), 6.5, (99 / 12) ** 0.5),
    "randint_like": (lambda: torch.randint_like(torch.empty(N), 10), 4.5, (99 / 12) ** 0.5),
    "random_": (lambda: torch.empty(N, dtype=torch.int64).random_(5, 15), 9.5, (99 / 12) ** 0.5),
    "random_ of a whole dtype": (lambda: torch.empty(N, dtype=torch.uint8).random_(), 127.0, 255 * 12**-0.5),
    "rand bfloat16": (lambda: torch.rand(N, dtype=torch.bfloat16), 0.5 - 2**-9, 12**-0.5),
    "rand complex": (lambda: torch.view_as_real(torch.rand(N, dtype=torch.complex64))[:, 1], 0.5, 12**-0.5),
    "randn complex": (lambda: torch.view_as_real(torch.randn(N, dtype=torch.complex64))[:, 1], 0.0, 0.5**0.5),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.5),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 3.0]), N, replacement=True), 0.75, 0.1875**0.5),
    "dropout": (lambda: functional.dropout(torch.ones(N), 0.25), 1.0, (1 / 3) ** 0.5),
    "feature dropout": (lambda: functional.dropout2d(torch.ones(N, 1, 1, 1), 0.25), 1.0, (1 / 3) ** 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distribution(name):
    draw, mean, deviation = DRAWS[name]
    with keyed(ps.random_key(11)):
        values = draw()
    values = values.double()
    assert float(values.mean()) == pytest.approx(mean, abs=5 * deviation / N**0.5)
    assert float(values.std()) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("name", DRAWS)
def test_drawn_from_the_key_alone_with_the_dtype_and_shape_of_torch(name):
    draw = DRAWS[name][0]
    plain, numbers = draw(), torch.random.get_rng_state()
    results = []
    for seed, key in ((0, 1), (1, 1), (0, 2)):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with keyed(ps.random_key(key)):
            results.append(draw())
        assert torch.equal(before, torch.random.get_rng_state())
    torch.random.set_rng_state(numbers)
    assert same_bits(results[0], results[1])
    assert not same_bits(results[0], results[2])
    assert (results[0].dtype, results[0].shape) == (plain.dtype, plain.shape)


@pytest.mark.parametrize("name", DRAWS)
def test_traced_it_has_the_eager_bits_and_no_random_operation(name):
    draw = DRAWS[name][0]

    def fn(key):
        with keyed(key):
            return draw()

    mode, key = fake_mode(), ps.random_key(3)
    graph = trace(fn, mode, [fake_of(mode, key)])
    tags = {tag for node in graph.graph.nodes for tag in getattr(node.target, "tags", ())}
    assert torch.Tag.nondeterministic_seeded not in tags
    assert same_bits(fn(key), graph(key))


def test_each_draw_is_another_one():
    with keyed(ps.random_key(0)):
        draws = [torch.rand(8) for _ in range(3)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


def test_a_permutation_is_one_and_draws_without_replacement_are_distinct():
    with keyed(ps.random_key(0)):
        order, picked = torch.randperm(50), torch.multinomial(torch.ones(50), 50)
        never = torch.multinomial(torch.tensor([0.0, 1.0, 1.0]), 2)
    assert sorted(order.tolist()) == sorted(picked.tolist()) == list(range(50))
    assert order.tolist() != list(range(50))
    assert 0 not in never.tolist()


def test_recurrent_and_attention_dropout_are_keyed():
    x = torch.randn(2, 5, 4)
    gru, q = torch.nn.GRU(4, 4, num_layers=2, dropout=0.5, batch_first=True), torch.randn(1, 2, 5, 4)
    for draw in (lambda: gru(x)[0], lambda: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)):
        results = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            with keyed(ps.random_key(5)):
                results.append(draw().detach())
        assert same_bits(*results)
        with keyed(ps.random_key(6)):
            assert not same_bits(results[0], draw().detach())


def test_kernels_with_dropout_switched_off_need_no_key():
    q = torch.randn(1, 2, 5, 4)
    with keyed(None):
        functional.scaled_dot_product_attention(q, q, q)
        functional.rrelu(q, training=False)
        functional.dropout(q, 0.5, training=False)


def test_the_generator_is_put_back_when_the_code_raises():
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="size"), keyed(ps.random_key(0)):
        torch.rand(3) + torch.ones(2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_draw_of_the_losses_own_meets_no_draw_of_its_modules():
    key = ps.random_key(4)
    with keyed(key):
        assert not torch.equal(torch.rand(8), ps.uniform(key, (8,)))


def test_the_carry_of_a_sequence_goes_through_the_loss():
    seen = []

    def loss(w, x, key, carry):
        seen.append(carry)
        hidden = x * w if carry is None else carry + x * w
        return ps.Loss(hidden.sum(), weight=len(x), carry=hidden.detach())

    forward, w = ps.forward(loss), torch.tensor(2.0)
    first = forward(w, torch.ones(2))
    second = forward(w, torch.ones(2), carry=first.carry)
    assert seen[0] is None
    assert seen[1].tolist() == [2.0, 2.0]
    assert float(second.total) == 8.0
    sums = ps.backward()(forward, w, torch.ones(2), carry=first.carry)
    assert float(sums.grads) == 2.0
