"""A module as a template: what its code keeps for itself stays out of every later call, in every form of the step."""

import copy
import logging
from collections import deque

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
    with pytest.raises(ps.StateError, match=r"attribute weights holds a\.weight in a tuple"):
        step_of(model)


class Box:
    def __init__(self):
        self.count, self.kept = 0, {}


class Deep(nn.Module):
    """Keeps what it counts where nobody looks: in an object, a deque, a list inside a tuple, a module in a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 2)
        self.box, self.queue, self.pair = Box(), deque([1.0], maxlen=3), ([], "x")
        self.hidden = [nn.Identity()]
        self.logger = logging.getLogger("kept by all")

    def forward(self, x):
        self.box.count += 1
        self.box.kept["last"] = x
        self.queue.append(2.0)
        self.pair[0].append(x)
        self.hidden[0].seen = len(self.pair[0])
        scale = self.box.count + len(self.queue) + len(self.pair[0]) + self.hidden[0].seen
        return self.line(x) * scale


@pytest.mark.parametrize("backend", RUNS)
def test_objects_below_a_module_are_put_back_as_well(backend):
    model, x = Deep(), torch.ones(4, 3)
    step = step_of(model, split=1)
    run, state = runner(step, backend), ps.init(model, step)
    first, second = run(state, x), run(state, x)
    assert differing(first, second) == []
    assert differing(first, step(state, x)) == []
    template = step.phases[0].forward.template.module
    assert (template.box.count, template.box.kept, list(template.queue), template.pair) == (0, {}, [1.0], ([], "x"))
    assert template.logger is model.logger


def closing(model):
    model.act = lambda x: model[0](x)
    return model


def hooked(model):
    scale = model[0].bias
    model.register_forward_hook(lambda module, args, output: output * scale.sum())
    return model


@pytest.mark.parametrize(
    ("break_it", "words"),
    [(closing, "act is a function that closes over the module"), (hooked, r"closes over 0\.bias")],
)
def test_functions_that_close_over_the_module_are_refused_by_name(break_it, words):
    with pytest.raises(ps.StateError, match=words):
        step_of(break_it(nn.Sequential(nn.Linear(3, 2))))


def test_a_compiled_module_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), torch.compile(nn.Linear(3, 2)))
    with pytest.raises(ps.StateError, match=r"1 is wrapped by torch\.compile"):
        step_of(model)


@pytest.mark.parametrize("backend", RUNS)
@pytest.mark.parametrize("change", ["parameter", "removed"])
def test_a_forward_that_makes_a_parameter_or_drops_a_buffer_is_refused_by_name(backend, change):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 2)
            self.register_buffer("hidden", torch.zeros(1))

        def forward(self, x):
            if change == "parameter":
                self.late = nn.Parameter(torch.ones(2))
                return self.line(x) * self.late
            self.hidden = None
            return self.line(x)

    step = step_of(Odd())
    with pytest.raises(ps.StateError, match="made late" if change == "parameter" else "removed hidden"):
        runner(step, backend)(ps.init(Odd(), step), torch.ones(4, 3))


def test_buffers_over_the_same_memory_are_refused_by_name():
    model = nn.Linear(3, 2)
    whole = torch.zeros(4)
    model.register_buffer("whole", whole)
    model.register_buffer("part", whole[1:2])
    with pytest.raises(ps.StateError, match="whole and part lie over the same memory"):
        step_of(model)
    apart = nn.Linear(3, 2)
    apart.register_buffer("one", whole[:2])
    apart.register_buffer("two", whole[2:])
    apart.register_buffer("again", apart.one)
    step_of(apart)


@pytest.mark.parametrize("training", [False, True])
def test_attention_has_the_same_bits_in_both_forms_frozen_or_not(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 2))
    model[0].requires_grad_(training).train(training)
    step, x = step_of(model), torch.linspace(-1, 1, 96).reshape(4, 3, 8)
    state, fast = ps.init(model, step), torch.backends.mha.get_fastpath_enabled()
    assert differing(step(state, x), runner(step, "aot_eager")(state, x)) == []
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_images_in_another_layout_go_through_the_loop():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 2))
    step = step_of(model, split=6)
    state, x = ps.init(model, step), torch.randn(12, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    assert differing(step(state, x), runner(step, "aot_eager")(state, x)) == []


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
    with pytest.raises(ps.StateError, match=r"made 0\.hidden.*None in the module"):
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
