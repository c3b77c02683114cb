"""A module as a template: what its code keeps for itself stays out of every later call, in every form of the step."""

import copy

import pytest
import torch
from torch import nn

import purestep as ps

from toys import differing, snapshot

CPU = ps.devices.cpu()
RUNS = ["none", "eager", "aot_eager"]


def step_of(model, *, split=2, tx=None):
    def loss(m, x, key):
        return ps.Loss(m(x).square().sum(), weight=len(x))

    return ps.compose(
        ps.split_batch(split), ps.forward(loss, model), ps.backward(), ps.accumulate(), ps.step(tx or ps.sgd(0.1))
    )


def runner(step, backend):
    return step if backend == "none" else ps.jit(step, device=CPU, backend=backend)


class Cache(nn.Module):
    """Keeps what it computed in every kind of container, as attention masks and positions are kept."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 2)
        self.cache, self.seen, self.names = {"deep": {}}, [], set()

    def forward(self, x):
        if len(x) not in self.cache["deep"]:
            self.cache["deep"][len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None] + 1.0
        self.seen.append(self.line.weight)
        self.names.add(len(self.seen))
        self.last = x
        return self.line(x) * self.cache["deep"][len(x)]


@pytest.mark.parametrize("first", RUNS)
@pytest.mark.parametrize("second", RUNS)
def test_what_a_module_caches_does_not_survive_the_call(first, second):
    model, x = Cache(), torch.arange(12.0).reshape(4, 3)
    step = step_of(model)
    state = ps.init(model, step)
    expected, _ = step_of(Cache())(state, x)
    runner(step, first)(state, x)
    after, metrics = runner(step, second)(state, x)
    assert type(metrics["loss"]) is torch.Tensor  # not a tensor without values, left over from a trace
    assert differing(expected, after) == []
    template = step.phases[0].forward.template.module
    assert (template.cache, template.seen, template.names) == ({"deep": {}}, [], set())
    assert not hasattr(template, "last")
    assert (model.cache, model.seen, model.names) == ({"deep": {}}, [], set())


class Aliased(nn.Module):
    """Looks its parameters up in a list and a dict beside their places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.weights = [self.a.weight, {"b": self.b.weight}]

    def forward(self, x):
        return x @ self.weights[0].T @ self.weights[1]["b"].T


@pytest.mark.parametrize("backend", RUNS)
def test_parameters_in_lists_and_dicts_are_bound_as_well(backend):
    model, x = Aliased(), torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    model.double()
    model.weights = [model.a.weight, {"b": model.b.weight}]
    step = step_of(model)
    state = ps.init(model, step)
    moved = state.replace(params=ps.map_leaves(lambda p: p + 0.5, state.params))
    oracle = {n: p.clone().requires_grad_() for n, p in moved.params.items()}
    (x @ oracle["a.weight"].T @ oracle["b.weight"].T).square().sum().div(4).backward()
    new, _ = runner(step, backend)(moved, x)
    for name in ("a.weight", "b.weight"):
        assert torch.allclose(new.params[name], oracle[name] - 0.1 * oracle[name].grad, rtol=1e-13)


def test_a_parameter_in_a_tuple_is_refused_by_name():
    model = Aliased()
    model.weights = (model.a.weight, model.b.weight)
    with pytest.raises(ps.StateError, match=r"'weights' holds a\.weight in a tuple"):
        step_of(model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_by_name(register):
    model = nn.Linear(3, 2)
    getattr(model.bias, register)(lambda *given: None)
    with pytest.raises(ps.StateError, match="parameter bias has a hook"):
        step_of(model)


@pytest.mark.parametrize("backend", RUNS)
def test_a_buffer_made_in_the_forward_is_refused_by_name(backend):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 2)
            self.register_buffer("hidden", None)

        def forward(self, x):
            self.hidden = x.detach()
            return self.line(x)

    model = nn.Sequential(Late())
    step = step_of(model)
    with pytest.raises(ps.StateError, match=r"made buffer 0\.hidden.*None in the module"):
        runner(step, backend)(ps.init(model, step), torch.ones(4, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.5, "bidirectional": True}])
def test_recurrent_modules_train_in_every_form_with_the_same_bits(kind, options):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.core = kind(3, 4, batch_first=True, **options)

        def forward(self, x):
            return self.core(x)[0]

    model, x = Last(), torch.linspace(-1, 1, 60).reshape(4, 5, 3)
    step = step_of(model, tx=ps.adam(1e-2))
    state = ps.init(model, step)
    enabled = torch.backends.mkldnn.enabled
    one, two = step(state, x), runner(step, "aot_eager")(state, x)
    assert differing(one, two) == []
    assert torch.backends.mkldnn.enabled == enabled
    if not options:
        total = model.double()(x.double()).square().sum() / 4
        assert torch.allclose(one[1]["loss"].double(), total, rtol=1e-6)


def test_a_failing_recurrent_forward_leaves_the_kernels_as_they_were():
    model = nn.LSTM(3, 4)
    step = ps.compose(
        ps.forward(lambda m, x, key: ps.Loss(m(x)[0].sum(), weight=len(x)), model),
        ps.backward(), ps.accumulate(), ps.step(ps.sgd(0.1)),
    )  # fmt: skip
    enabled = torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        step(ps.init(model, step), torch.ones(2, 5, 7))
    assert torch.backends.mkldnn.enabled == enabled


def test_a_normalisation_that_reads_its_counter_is_named_when_it_cannot_be_traced():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None))
    step = step_of(model)
    state, x = ps.init(model, step), torch.ones(4, 3)
    step(state, x)
    with pytest.raises(
        ps.TraceError, match=r"in BatchNorm1d\.forward, at .*test_template\.py:\d+: return ps\.Loss\(m\(x\)"
    ):
        runner(step, "aot_eager")(state, x)


def test_a_jitted_step_can_be_copied():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    step = step_of(model)
    fast = runner(step, "aot_eager")
    state = ps.init(model, step)
    before = fast(state, x)
    twin = copy.deepcopy(fast)
    assert differing(before, twin(state, x)) == []
    assert (fast.compiles, twin.compiles) == (1, 1)
    assert snapshot(state)
