"""Keys and draws: known answers, an independent restatement, distributions, and the same bits eager and traced."""

import math
import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import purestep as ps
from purestep.state.key import bits
from purestep.state.philox import philox4x32
from purestep.state.torch_private import fake_mode, fake_of, trace

from .strategies import seeds

WORD = st.integers(0, 2**32 - 1)
OFFSET = st.integers(0, 2**62 - 64)
DATA = st.integers(0, 2**62 - 1)
COUNT = st.integers(0, 70)
DRAWS = {
    "bits": lambda key, n, **kw: bits(key, n, **kw),
    "uniform": lambda key, n, **kw: ps.uniform(key, (n,), **kw),
    "uniform64": lambda key, n, **kw: ps.uniform(key, (n,), dtype=torch.float64, **kw),
    "normal": lambda key, n, **kw: ps.normal(key, (n,), **kw),
    "normal64": lambda key, n, **kw: ps.normal(key, (n,), 1.0, 3.0, dtype=torch.float64, **kw),
    "bernoulli": lambda key, n, **kw: ps.bernoulli(key, 0.3, (n,), **kw),
}
draws = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


def philox_numpy(counter, key):
    """Philox4x32-10 as Salmon et al. state it, in uint64 with words of 32 bits."""
    mask = np.uint64(0xFFFFFFFF)
    x, k = [np.asarray(w, dtype=np.uint64) for w in counter], [np.asarray(w, dtype=np.uint64) for w in key]
    for _ in range(10):
        p0, p1 = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(p1 >> np.uint64(32)) ^ x[1] ^ k[0], p1 & mask, (p0 >> np.uint64(32)) ^ x[3] ^ k[1], p0 & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return x


def blocks_numpy(seed, offset, count, stream=0):
    """(count, 4) words: block n of a key's stream has the counter (offset + n, stream, 0)."""
    place = [offset + n for n in range(count)]
    low, high = [p % 2**32 for p in place], [p // 2**32 % 2**32 for p in place]
    words = philox_numpy((low, high, [stream] * count, [0] * count), (seed % 2**32, seed // 2**32 % 2**32))
    return np.stack(words, axis=-1)


def signed(value):
    return value - 2**64 if value >= 2**63 else value


def key_at(seed, offset):
    return torch.tensor([signed(seed), offset])


def traced(fn, *tensors):
    mode = fake_mode()
    graph = trace(lambda *args: [fn(*args)], mode, [fake_of(mode, t) for t in tensors])
    return lambda *values: graph(*values)[0]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in words] == answer


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=20), WORD, WORD)
def test_philox_equals_the_plain_restatement(counters, k0, k1):
    columns = list(zip(*counters, strict=True))
    ours = philox4x32(tuple(torch.tensor(c) for c in columns), (torch.tensor(k0), torch.tensor(k1)))
    np.testing.assert_array_equal(torch.stack(ours).numpy(), np.stack(philox_numpy(columns, (k0, k1))).astype(np.int64))


@given(seeds, OFFSET, COUNT, st.integers(0, 2**31 - 1))
def test_bits_are_the_words_of_consecutive_blocks(seed, offset, count, stream):
    words = blocks_numpy(seed, offset, 20, stream).reshape(-1)[:count]
    np.testing.assert_array_equal(bits(key_at(seed, offset), count, stream=stream).numpy(), words.astype(np.int64))


@given(seeds, OFFSET, COUNT)
def test_uniform_is_the_top_24_or_53_bits(seed, offset, count):
    key, words = key_at(seed, offset), blocks_numpy(seed, offset, 40)
    single = (words.reshape(-1)[:count] // 2**8).astype(np.float32) / np.float32(2**24)
    pairs = words.reshape(-1, 2)
    double = ((pairs[:, 0] * 2**21 + pairs[:, 1] // 2**11).astype(np.float64) / 2.0**53)[:count]
    np.testing.assert_array_equal(ps.uniform(key, (count,)).numpy(), single)
    np.testing.assert_array_equal(ps.uniform(key, (count,), dtype=torch.float64).numpy(), double)


@given(seeds, COUNT)
def test_normal_is_box_muller_of_pairs_of_uniforms(seed, count):
    u, v = ps.uniform(key_at(seed, 0), (80, 2), dtype=torch.float64).numpy().T
    radius = np.sqrt(-2.0 * np.log1p(-u))
    pairs = np.stack([radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)], axis=-1).reshape(-1)[:count]
    found = ps.normal(key_at(seed, 0), (count,), 2.0, 3.0, dtype=torch.float64).numpy()
    np.testing.assert_allclose(found, 2.0 + 3.0 * pairs, rtol=1e-13, atol=1e-13)


@given(seeds, OFFSET, DATA)
def test_fold_in_takes_a_counter_that_no_draw_has(seed, offset, data):
    counter = (offset % 2**32, offset // 2**32, data % 2**32, data // 2**32 + 2**31)
    w = [int(word) for word in philox_numpy(counter, (seed % 2**32, seed // 2**32))]
    assert ps.fold_in(key_at(seed, offset), data).tolist() == [
        signed(w[0] + w[1] * 2**32),
        (w[2] + w[3] * 2**32) % 2**62,
    ]


@given(seeds, st.lists(DATA, min_size=1, max_size=6))
def test_fold_in_of_a_tensor_folds_each_element(seed, data):
    key = ps.random_key(seed)
    many = ps.fold_in(key, torch.tensor(data).reshape(1, -1))
    assert many.shape == (1, len(data), 2)
    assert many[0].tolist() == [ps.fold_in(key, n).tolist() for n in data]
    assert ps.fold_in(key, torch.tensor(data[0])).tolist() == many[0, 0].tolist()


@given(seeds, st.integers(1, 9))
def test_split_gives_the_folds_of_the_first_integers(seed, count):
    key = ps.random_key(seed)
    assert ps.split(key, count).tolist() == [ps.fold_in(key, i).tolist() for i in range(count)]


def test_folded_keys_all_differ_and_stay_readable():
    keys = ps.fold_in(ps.random_key(0), torch.arange(20_000))
    assert len({tuple(key) for key in keys.tolist()}) == 20_000
    assert bool((keys[:, 1] >= 0).all())
    assert bool((keys[:, 1] < 2**62).all())


@draws
@given(seed=seeds, few=COUNT, more=COUNT)
def test_a_shorter_draw_is_a_prefix_of_a_longer_one(draw, seed, few, more):
    key = ps.random_key(seed)
    assert torch.equal(draw(key, few), draw(key, few + more)[:few])


@draws
def test_keys_and_streams_give_other_numbers(draw):
    key = ps.random_key(5)
    drawn = [draw(key, 500, stream=s) for s in (0, 1, 2**31 - 1)]
    drawn += [draw(k, 500) for k in (ps.random_key(6), *ps.split(key, 2))]
    columns = torch.stack(drawn).to(torch.float64)
    correlation = torch.corrcoef(columns) - torch.eye(len(drawn), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(500)


@draws
def test_a_draw_leaves_the_global_generators_and_its_key_alone(draw):
    key, before = ps.random_key(1), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    draw(key, 50)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert key.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 24), (torch.float64, 53), (torch.bfloat16, 8), (torch.float16, 11)]
)
def test_uniform_fills_its_range_to_the_last_bit(dtype, width):
    value = ps.uniform(ps.random_key(2), (100_000,), dtype=dtype).to(torch.float64)
    scaled = value * 2.0**width
    assert float(value.min()) >= 0.0
    assert float(value.max()) < 1.0
    assert torch.equal(scaled, scaled.floor())
    assert 0.45 < float((scaled % 2).mean()) < 0.55


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform_and_normal_have_their_moments(dtype):
    n = 200_000
    u = ps.uniform(ps.random_key(3), (n,), -1.0, 3.0, dtype=dtype)
    z = ps.normal(ps.random_key(4), (n,), 2.0, 0.5, dtype=dtype)
    assert u.dtype == z.dtype == dtype
    u, z = u.to(torch.float64), (z.to(torch.float64) - 2.0) / 0.5
    assert float(u.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(u.var()) == pytest.approx(16 / 12, rel=0.02)
    moments = [float((z**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.08)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_have_two_independent_parts(dtype):
    n = 200_000
    u, z = (torch.view_as_real(draw(ps.random_key(5), (n,), dtype=dtype)) for draw in (ps.uniform, ps.normal))
    assert u.dtype == z.dtype == dtype.to_real()
    for part in (0, 1):
        assert float(u[:, part].mean()) == pytest.approx(0.5, abs=0.01)
        assert float(z[:, part].mean()) == pytest.approx(0.0, abs=0.01)
        assert float(z[:, part].var()) == pytest.approx(0.5, rel=0.02)
    for both in (u, z):
        assert abs(float(torch.corrcoef(both.T)[0, 1])) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_pass_a_kolmogorov_smirnov_test(dtype):
    stats = pytest.importorskip("scipy.stats")
    u = ps.uniform(ps.random_key(7), (50_000,), dtype=dtype).double().numpy()
    z = ps.normal(ps.random_key(8), (50_000,), dtype=dtype).double().numpy()
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.kstest(z, "norm").pvalue > 1e-3


def test_bounds_and_moments_may_be_tensors():
    key, low, high = ps.random_key(0), torch.tensor([0.0, 10.0]), torch.tensor([1.0, 30.0])
    assert torch.equal(ps.uniform(key, (9, 2), low, high), low + (high - low) * ps.uniform(key, (9, 2)))
    mean = torch.tensor([0.0, 100.0], dtype=torch.float64)
    assert torch.equal(ps.normal(key, (9, 2), mean), (mean + ps.normal(key, (9, 2), dtype=torch.float64)).float())


@pytest.mark.parametrize("p", [0.001, 0.25, 0.5, 0.9, 1 / 3])
def test_bernoulli_has_the_rate_p_as_number_and_as_tensor(p):
    n, key = 100_000, ps.random_key(11)
    by_number = ps.bernoulli(key, p, (n,))
    assert by_number.dtype == torch.bool
    assert abs(int(by_number.sum()) - n * p) < 5 * math.sqrt(n * p * (1 - p))
    assert torch.equal(ps.bernoulli(key, torch.tensor(p, dtype=torch.float64), (n,)), by_number)


@pytest.mark.parametrize("p", [0.0, 1.0, 0, 1])
def test_bernoulli_is_certain_at_the_ends(p):
    expected = torch.full((10_000,), bool(p))
    assert torch.equal(ps.bernoulli(ps.random_key(0), p, (10_000,)), expected)
    assert torch.equal(ps.bernoulli(ps.random_key(0), torch.full((10_000,), float(p))), expected)


def test_bernoulli_takes_a_rate_per_element_and_a_dtype():
    p = torch.tensor([[0.0, 0.2, 1.0]])
    drawn = ps.bernoulli(ps.random_key(0), p, (50_000, 3), dtype=torch.float32)
    assert drawn.dtype == torch.float32
    assert drawn.mean(0).tolist() == pytest.approx([0.0, 0.2, 1.0], abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@draws
def test_the_default_dtype_does_not_matter(draw, dtype):
    usual, before = draw(ps.random_key(9), 33), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        other = draw(ps.random_key(9), 33)
    finally:
        torch.set_default_dtype(before)
    assert other.dtype == usual.dtype
    assert torch.equal(other, usual)


@draws
@pytest.mark.parametrize("count", [1, 4, 7, 1001])
def test_a_traced_draw_has_the_bits_of_the_eager_one_for_any_key(draw, count):
    graph = traced(lambda key: draw(key, count), ps.random_key(0))
    for key in (ps.random_key(0), ps.random_key(-5), ps.fold_in(ps.random_key(3), 8)):
        assert torch.equal(graph(key), draw(key, count))


@given(seeds, st.lists(DATA, min_size=3, max_size=3))
def test_traced_folds_and_tensor_rates_have_the_eager_bits(seed, data):
    key, numbers, p = ps.random_key(seed), torch.tensor(data), torch.tensor([0.1, 0.5, 0.9])
    assert torch.equal(traced(ps.fold_in, key, numbers)(key, numbers), ps.fold_in(key, numbers))
    assert torch.equal(traced(ps.bernoulli, key, p)(key, p), ps.bernoulli(key, p))


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_seed_is_taken_modulo_64_bits(seed):
    assert ps.random_key(seed).tolist() == [signed(seed % 2**64), 0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ps.random_key(True), TypeError, "seed must be an int"),
        (lambda: ps.random_key(1.0), TypeError, "seed must be an int"),
        (lambda: ps.random_key(2**64), ValueError, "seed must fit 64 bits"),
        (lambda: ps.random_key(-(2**63) - 1), ValueError, "seed must fit 64 bits"),
        (lambda: ps.fold_in(ps.random_key(0), -1), ValueError, "data must be a non-negative integer"),
        (lambda: ps.fold_in(ps.random_key(0), 2**62), ValueError, "data must be a non-negative integer"),
        (lambda: ps.split(ps.random_key(0), 0), ValueError, "count must be positive"),
        (lambda: ps.bernoulli(ps.random_key(0), 1.5, (2,)), ValueError, "p must lie in"),
        (lambda: ps.bernoulli(ps.random_key(0), -0.1, (2,)), ValueError, "p must lie in"),
        (lambda: ps.bernoulli(ps.random_key(0), math.nan, (2,)), ValueError, "p must lie in"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "key", [7, torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros((), dtype=torch.int64)]
)
@pytest.mark.parametrize("use", [lambda k: ps.fold_in(k, 1), lambda k: bits(k, 3), lambda k: ps.normal(k, (2,))])
def test_what_is_no_key_is_refused(key, use):
    with pytest.raises((TypeError, ValueError), match=r"key must be an int64 tensor of shape \(2,\)"):
        use(key)
