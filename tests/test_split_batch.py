"""split_batch: any tree, equal parts and one smaller remainder, nothing changed (case 79)."""

import dataclasses
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import purestep as ps
from purestep.steps.split_batch import rows

from toys import differing, snapshot

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str
    size: int = dataclasses.field(init=False, default=3)


@attrs.frozen
class Frozen:
    x: torch.Tensor
    extra: object = None


class Opaque:
    def to(self, device):
        raise AssertionError("a split moves nothing")


def mixed(count):
    x = torch.arange(count * 2.0).reshape(count, 2)
    return {
        "pair": Pair(x, x + 1),
        "record": Record(x, "name"),
        "attrs": Frozen(x, None),
        "columns": [x, x[:, 0]],
        "tuple": (x, None, 3, 0.5, "text", torch.tensor(7.0)),
        "ragged": {"rows": [torch.arange(i + 1) for i in range(count)]},
    }


@given(count=st.integers(3, 20), parts=st.integers(1, 3))
def test_mixed_trees_keep_their_structure_and_add_up(count, parts):
    batch = mixed(count)
    before, opaque = snapshot(batch), Opaque()
    batch["opaque"] = opaque
    out = ps.split_batch(parts)(batch)
    assert differing(before, snapshot(batch)) == []
    assert [rows(part) for part in out] == [x.shape[0] for x in torch.arange(count).split(-(-count // parts))]
    for part in out:
        assert type(part["pair"]) is Pair
        assert type(part["record"]) is Record
        assert (part["record"].name, part["record"].size) == ("name", 3)
        assert type(part["attrs"]) is Frozen
        assert part["attrs"].extra is None
        assert part["tuple"][1:5] == (None, 3, 0.5, "text")
        assert float(part["tuple"][5]) == 7.0
        assert part["opaque"] is opaque
        assert part["ragged"]["rows"][0].shape[0] >= 1
    for read in (lambda p: p["pair"].y, lambda p: p["record"].x, lambda p: p["columns"][1], lambda p: p["tuple"][0]):
        assert torch.equal(torch.cat([read(part) for part in out]), read(batch))
    assert [x.tolist() for part in out for x in part["ragged"]["rows"]] == [x.tolist() for x in batch["ragged"]["rows"]]


@pytest.mark.parametrize(
    ("total", "count", "sizes"),
    [(10, 4, [3, 3, 3, 1]), (9, 4, [3, 3, 3]), (8, 4, [2] * 4), (7, 1, [7]), (5, 5, [1] * 5)],
)
def test_parts_are_equal_and_at_most_one_is_smaller(total, count, sizes):
    assert [len(part) for part in ps.split_batch(count)(torch.zeros(total))] == sizes


def test_size_sets_the_rows_of_a_part():
    assert [len(part) for part in ps.split_batch(size=4)(torch.zeros(10))] == [4, 4, 2]


@pytest.mark.parametrize("ordered", [True, False])
def test_packed_sequences_are_cut_by_sequence(ordered):
    lengths = [5, 4, 2, 1] if ordered else [2, 5, 1, 4]
    sequences = [torch.arange(float(n)) + 10 * i for i, n in enumerate(lengths)]
    packed = pack_sequence(sequences, enforce_sorted=ordered)
    parts = ps.split_batch(2)({"x": packed, "y": torch.arange(4)})
    found = []
    for part in parts:
        assert isinstance(part["x"], PackedSequence)
        padded, sizes = pad_packed_sequence(part["x"], batch_first=True)
        found += [row[:size].tolist() for row, size in zip(padded, sizes, strict=True)]
    assert found == [x.tolist() for x in sequences]


def test_packed_sequences_train_as_their_undivided_batch():
    model = torch.nn.GRU(1, 3, batch_first=True).double()
    sequences = [
        torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 3, 2, 1)
    ]

    def loss(model, packed, key):
        out, _ = model(packed)
        return ps.Loss((out.data**2).sum(), weight=len(out.data))

    results = []
    for split in (1, 2, 4):
        step = ps.compose(
            ps.split_batch(split), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0))
        )
        results.append(step(ps.init(model, step), pack_sequence(sequences))[0])
    for other in results[1:]:
        for name in other.params:
            torch.testing.assert_close(other.params[name], results[0].params[name], rtol=1e-10, atol=1e-12)
    assert int(results[0].counters.samples) == 4


def test_a_list_that_may_be_rows_or_columns_is_refused():
    square = {"rows": [torch.zeros(2), torch.zeros(2)], "y": torch.zeros(2)}
    with pytest.raises(ps.BatchError, match="a list of rows or of columns"):
        ps.split_batch(2)(square)
    assert len(ps.split_batch(2)({"rows": (torch.zeros(2), torch.zeros(2)), "y": torch.zeros(2)})) == 2
    assert len(ps.split_batch(2)([torch.zeros(2), torch.zeros(2)])) == 2  # what a DataLoader collates: columns


def test_a_list_as_the_batch_itself_is_columns():
    with pytest.raises(ps.BatchError, match=r"batch\[0\] has 3, batch\[1\] has 2"):
        ps.split_batch(2)([torch.zeros(3), torch.zeros(2)])


def test_numpy_arrays_are_tensors():
    batch = {"x": np.arange(6.0).reshape(3, 2), "flip": np.arange(3)[::-1], "scale": np.float32(0.5), "n": np.int64(3)}
    fixed = np.arange(3)
    fixed.flags.writeable = False
    parts = ps.split_batch(3)({**batch, "fixed": fixed})
    assert [part["x"].tolist() for part in parts] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]]]
    assert [part["flip"].tolist() for part in parts] == [[2], [1], [0]]
    assert all(torch.equal(part["scale"], torch.tensor(0.5)) for part in parts)
    with pytest.raises(ps.BatchError, match=r"batch\['names'\] is a NumPy array of dtype <U1"):
        ps.split_batch(3)({**batch, "names": np.array(["a", "b", "c"])})


def test_numpy_and_tensor_batches_train_alike_in_every_form():
    def loss(w, batch, key):
        return ps.Loss((w * batch["x"]).sum() * batch["scale"], weight=len(batch["x"]))

    step = ps.compose(ps.split_batch(2), ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
    state = ps.init(torch.zeros((), dtype=torch.float64), step)
    arrays = {"x": np.array([1.0, 2.0, 4.0]), "scale": np.float64(3.0)}
    tensors = {"x": torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), "scale": torch.tensor(3.0, dtype=torch.float64)}
    fast = ps.jit(step, device=ps.devices.cpu(), backend="aot_eager")
    found = [float(run(state, batch)[0].params) for run in (step, fast) for batch in (arrays, tensors)]
    assert found == [-7.0] * 4
    assert fast.compiles == 1


@pytest.mark.parametrize("kind", [list, tuple])
def test_one_string_per_row_is_cut_with_the_rows(kind):
    parts = ps.split_batch(2)({"x": torch.zeros(3), "names": kind("abc"), "task": kind("ab"), "title": "abc"})
    assert [part["names"] for part in parts] == [kind("ab"), kind("c")]
    assert [(part["task"], part["title"]) for part in parts] == [(kind("ab"), "abc")] * 2


@pytest.mark.parametrize("numbers", [[0.1, 0.2, 0.3], (1, 2, 3), [True, False, True]])
def test_one_number_per_row_in_a_list_is_refused(numbers):
    with pytest.raises(ps.BatchError, match="one item per row or be shared by all"):
        ps.split_batch(3)({"x": torch.zeros(3), "weights": numbers})
    assert ps.split_batch(2)({"x": torch.zeros(4), "weights": numbers})[1]["weights"] == numbers


@pytest.mark.parametrize(
    "shared", [(torch.tensor(1.0), torch.tensor(2.0)), [[0.0], [1.0]], [torch.tensor(0), torch.tensor(1)]]
)
def test_what_may_be_rows_or_shared_is_refused_where_it_matters(shared):
    batch = {"x": torch.zeros(2), "shared": shared}
    with pytest.raises(ps.BatchError, match="one item per row or be shared by all"):
        ps.split_batch(2)(batch)
    assert len(ps.split_batch(1)(batch)) == 1
    four = ps.split_batch(2)({"x": torch.zeros(4), "shared": shared})  # a microbatch of as many rows is no matter
    assert [len(part["shared"]) for part in four] == [2, 2]
    step = ps.compose(
        ps.split_batch(2), ps.forward(lambda w, b, key: ps.Loss((w * b["x"]).sum(), weight=len(b["x"]))),
        ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)),
    )  # fmt: skip
    state, _ = step(ps.init(torch.zeros(()), step), {"x": torch.ones(4), "shared": shared})
    assert int(state.counters.samples) == 4


def test_a_list_with_a_dict_per_row_is_cut_with_the_rows():
    """What detection models take: an image, and boxes of another number for each."""
    images = torch.zeros(3, 2, 2)
    targets = [{"boxes": torch.full((n, 4), float(n)), "labels": torch.arange(n)} for n in (1, 3, 2)]
    parts = ps.split_batch(2)({"images": images, "targets": targets, "tags": [["a"], ["b", "c"], []]})
    assert [[len(t["labels"]) for t in part["targets"]] for part in parts] == [[1, 3], [2]]
    assert [part["tags"] for part in parts] == [[["a"], ["b", "c"]], [[]]]
    single = [{"y": torch.tensor(float(n))} for n in range(3)]
    assert [[float(t["y"]) for t in part["y"]] for part in ps.split_batch(2)({"x": images, "y": single})] == [
        [0.0, 1.0],
        [2.0],
    ]


def test_sparse_batches_are_cut_eagerly():
    x = torch.eye(4).to_sparse()
    parts = ps.split_batch(2)((x, torch.arange(4)))
    assert [part[0].to_dense().tolist() for part in parts] == [torch.eye(4)[:2].tolist(), torch.eye(4)[2:].tolist()]


def test_arguments_are_checked():
    for arguments, message in (
        ({}, "either count or size"), ({"count": 2, "size": 2}, "either count or size"),
        ({"count": 2.0}, "count must be a positive int, got 2.0"), ({"size": True}, "size must be a positive int"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ps.split_batch(**arguments)
