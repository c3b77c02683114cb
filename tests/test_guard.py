"""Whatever a function is given it may read, not write: each way of writing is refused by the leaf's path."""

import pytest
import torch
from torch import nn

import purestep as ps

from toys import differing, snapshot

RUNS = ["none", "eager", "aot_eager"]
CPU = ps.devices.cpu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3, max_norm=None)
        self.line = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.scale = ps.constant(torch.ones(2))
        self.kept = {"bias": [ps.constant(torch.zeros(2))]}

    def forward(self, rows):
        return self.line(self.table(rows)) * self.scale + self.kept["bias"][0]


def batch():
    return {"rows": torch.tensor([0, 1, 2, 3]), "x": torch.ones(4, 2)}


def plain_loss(model, batch, key):
    return ps.Loss((model(batch["rows"]) * batch["x"]).sum(), weight=len(batch["x"]))


def loss_that(write):
    def loss(model, batch, key):
        with torch.no_grad():
            write(model, batch, key)
        return plain_loss(model, batch, key)

    return {"loss": loss}


def renormed(model, batch, key):
    nn.functional.embedding(batch["rows"], model.table.weight, max_norm=0.1)


def own_optimizer(write):
    def update(grads, opt_state, params, hyper=None):
        write(grads, opt_state, params)
        return ps.map_leaves(lambda g: -0.1 * g, grads), opt_state

    return {"tx": ps.Transformation(lambda params: ps.map_leaves(torch.zeros_like, params), update)}


def first(tree):
    return next(leaf for leaf in tree.values() if leaf is not None)


def slot_writer(state, slot):
    slot.add_(1.0)
    return state, slot


WRITES = {
    r"batch\['x'\]": loss_that(lambda m, b, k: b["x"].mul_(2)),
    r"batch\['x'\].": loss_that(lambda m, b, k: b["x"][1:, 0].zero_()),
    r"batch\['rows'\]": loss_that(lambda m, b, k: b["rows"].data.fill_(0)),
    r"batch\['x'\]..": loss_that(lambda m, b, k: torch.add(b["x"], 1, out=b["x"])),
    r"batch\['x'\]...": loss_that(lambda m, b, k: torch._foreach_mul_([b["x"]], 2.0)),
    r"params\['line.bias'\]": loss_that(lambda m, b, k: m.line.bias.add_(1)),
    r"params\['line.weight'\]": loss_that(lambda m, b, k: m.line.weight.data.clamp_(-0.1, 0.1)),
    r"params\['table.weight'\]": loss_that(renormed),
    r"model\['scale'\]": loss_that(lambda m, b, k: m.scale.add_(1)),
    r"model\['kept\.bias\[0\]'\]": loss_that(lambda m, b, k: m.kept["bias"][0].add_(1)),
    "key": loss_that(lambda m, b, k: k.add_(1)),
    r"batch\['x'\]....": {"before_split": lambda b: {**b, "x": b["x"].mul_(2)}},
    r"microbatch\['x'\]": {"before_forward": lambda b: {**b, "x": b["x"].mul_(2)}},
    r"loss\.total": {"before_backward": lambda loss: loss.replace(total=loss.total.detach().mul_(2) + loss.total)},
    r"sums\.grads": {"before_accumulate": lambda s: (first(s.grads).mul_(2), s)[1]},
    r"grads\['table.weight'\]": {"before_step": lambda g: (first(g).mul_(2), g)[1]},
    r"state\.params": {"after_step": lambda s: (first(s.params).zero_(), s)[1]},
    r"state\.key": {"after_step": lambda s: (s.key.add_(1), s)[1]},
    "slot": {"after_step": ps.concern(slot_writer, slot="mine", init=lambda params: torch.zeros(()))},
    r"state\.opt_state": own_optimizer(lambda g, o, p: first(o).add_(1)),
    r"state\.params\['table.weight'\]": own_optimizer(lambda g, o, p: first(p).add_(1)),
    r"grads\['table.weight'\].": own_optimizer(lambda g, o, p: first(g).add_(1)),
    r"state\.counters\.updates": {"before_step": ps.schedule(lr=lambda count: count.add_(1) * 0.1)},
    r"state\.opt_state\.count": {"tx": ps.sgd(lambda count: count.add_(1) * 0.1)},
}


def built(split, where):
    def at(place):
        return (where[place],) if place in where else ()

    model = Net()
    step = ps.compose(
        *at("before_split"), ps.split_batch(split), *at("before_forward"),
        ps.forward(where.get("loss", plain_loss), model), *at("before_backward"), ps.backward(),
        *at("before_accumulate"), ps.accumulate(), *at("before_step"),
        ps.step(where.get("tx") or ps.sgd(0.1, momentum=0.9)), *at("after_step"),
    )  # fmt: skip
    return step, ps.init(model, step)


def runner(step, backend):
    return step if backend == "none" else ps.jit(step, device=CPU, backend=backend)


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("split", [1, 2])
def test_a_write_into_what_was_given_is_refused_and_nothing_is_changed(path, backend, split):
    step, state = built(split, WRITES[path])
    given = batch()
    before = snapshot(state), snapshot(given), snapshot(step.phases[0].forward.template.constants)
    with pytest.raises(ps.PurityError, match=path.rstrip(".")):
        runner(step, backend)(state, given)
    assert differing(before[0], snapshot(state)) == []
    assert differing(before[1], snapshot(given)) == []
    assert differing(before[2], snapshot(step.phases[0].forward.template.constants)) == []


@pytest.mark.parametrize("backend", RUNS)
def test_a_write_inside_the_loop_over_microbatches_is_refused_as_well(backend):
    step, state = built(4, WRITES[r"batch\['x'\]"])
    four = {name: leaf.repeat_interleave(2, 0) for name, leaf in batch().items()}
    looped = ps.compose(*(ps.split_batch(8) if isinstance(c, type(step.concerns[0])) else c for c in step.concerns))
    with pytest.raises(ps.PurityError, match=r"batch\['x'\]"):
        runner(looped, backend)(state, four)


@pytest.mark.parametrize("backend", RUNS)
def test_what_a_function_makes_itself_it_may_write(backend):
    def loss(model, batch, key):
        total = torch.zeros(())
        total += (model(batch["rows"]) * batch["x"].clone().mul_(2.0)).sum()
        model.seen.add_(1.0)  # a buffer of the microbatch's own
        return ps.Loss(total, weight=len(batch["x"]))

    step, state = built(2, {"loss": loss})
    new, metrics = runner(step, backend)(state, batch())
    assert bool(metrics["updated"])
    assert new.buffers["seen"].tolist() == [1.0, 1.0]
    assert state.buffers["seen"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("backend", RUNS)
def test_containers_that_a_function_is_given_are_its_own(backend):
    def loss(model, batch, key):
        x = batch.pop("x")
        batch["more"].append(1)
        batch["more"] = None
        return ps.Loss((model(batch["rows"]) * x).sum(), weight=len(x))

    def before(batch):
        batch["late"] = batch["x"] + 1.0
        return batch

    model = Net()
    step = ps.compose(before, ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)))
    given = {**batch(), "more": ["a"]}
    run, state = runner(step, backend), ps.init(model, step)
    for _ in range(2):
        state, _ = run(state, given)
    assert set(given) == {"rows", "x", "more"}
    assert given["more"] == ["a"]


def test_an_optimizer_is_guarded_at_its_first_update_and_costs_nothing_later():
    calls = []
    step, state = built(1, own_optimizer(lambda g, o, p: calls.append(len(calls)) or (len(calls) > 1 and first(o))))
    for _ in range(3):
        state, _ = step(state, batch())
    assert calls == [0, 1, 2]


def exchange(tensor):
    tensor.data = tensor.data * 0.5


EXCHANGES = {
    r"batch\['x'\]\.data": loss_that(lambda m, b, k: exchange(b["x"])),
    r"params\['line.bias'\]\.data": loss_that(lambda m, b, k: exchange(m.line.bias)),
    r"buffers\['seen'\]\.data": loss_that(lambda m, b, k: exchange(m.seen)),
    r"model\['scale'\]\.data": loss_that(lambda m, b, k: exchange(m.scale)),
    r"microbatch\['x'\]\.data": {"before_forward": lambda b: (exchange(b["x"]), b)[1]},
    r"grads\['\S+'\]\.data": {"before_step": lambda g: (exchange(first(g)), g)[1]},
    r"state\.params\['\S+'\]\.data": {"after_step": lambda s: (exchange(first(s.params)), s)[1]},
    r"slots\['mine'\]\.data": {
        "after_step": ps.concern(lambda s, m: (exchange(m), (s, m))[1], slot="mine", init=lambda p: torch.ones(2))
    },
    r"state\.opt_state\['\S+'\]\.data": own_optimizer(lambda g, o, p: exchange(first(o))),
}


@pytest.mark.parametrize("path", EXCHANGES)
@pytest.mark.parametrize("backend", RUNS)
def test_assigning_to_data_is_refused_and_put_back(path, backend):
    step, state = built(2, EXCHANGES[path])
    given = batch()
    before = snapshot(state), snapshot(given), snapshot(step.phases[0].forward.template.constants)
    with pytest.raises(ps.PurityError, match=path + " was assigned"):
        runner(step, backend)(state, given)
    assert differing(before[0], snapshot(state)) == []
    assert differing(before[1], snapshot(given)) == []
    assert differing(before[2], snapshot(step.phases[0].forward.template.constants)) == []


@pytest.mark.parametrize("backend", RUNS)
def test_flags_set_on_the_batch_stay_in_the_step(backend):
    def loss(model, batch, key):
        batch["x"].requires_grad_()
        return plain_loss(model, batch, key)

    step, state = built(2, {"loss": loss})
    given, run = batch(), runner(step, backend)
    for _ in range(2):
        state, _ = run(state, given)
    assert not given["x"].requires_grad


def assigning(tree, key, value):
    tree[key] = value
    return tree


@pytest.mark.parametrize("backend", RUNS)
def test_dicts_of_a_slot_or_of_an_optimizer_are_its_own(backend):
    def update(grads, opt_state, params, hyper=None):
        for name, grad in grads.items():
            opt_state[name] = 0.9 * opt_state[name] + grad
        return ps.map_leaves(lambda m: -0.1 * m, opt_state), opt_state

    def mean(state, slot):
        for name, param in state.params.items():
            slot[name] = 0.9 * slot[name] + 0.1 * param
        return state, slot

    where = {
        "tx": ps.Transformation(lambda params: ps.map_leaves(torch.zeros_like, params), update),
        "after_step": ps.concern(mean, slot="mean", init=lambda params: params),
        "before_step": lambda grads: assigning(grads, "line.bias", grads["line.bias"] * 2.0),
    }
    step, state = built(2, where)
    run, given, before = runner(step, backend), batch(), snapshot(state)
    one, two = run(state, given), run(state, given)
    assert differing(one, two) == []
    assert differing(before, snapshot(state)) == []
    nothing = ps.compose(
        ps.forward(lambda m, b, key: ps.Loss(m(b["rows"]).sum(), weight=torch.zeros(())), Net()), ps.backward(),
        ps.accumulate(), ps.step(where["tx"]), where["after_step"],
    )  # fmt: skip
    start = ps.init(Net(), nothing)
    after, metrics = runner(nothing, backend)(start, given)
    assert not bool(metrics["updated"])
    assert differing((start.slots, start.opt_state), (after.slots, after.opt_state)) == []
