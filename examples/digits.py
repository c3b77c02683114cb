"""Handwritten digits: a small convolutional classifier, trained by one compiled step.

Run it with ``python examples/digits.py``; ``--help`` lists the options. It prints a line per epoch and draws the curves
into ``examples/out/digits.png``. The data come with scikit-learn, nothing is downloaded.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import purestep as ps

BATCH = 64


class Data(NamedTuple):
    """Pictures, float32 of shape (n, 1, 8, 8) in [0, 1], and their digits, int64 of shape (n,)."""

    x: torch.Tensor
    y: torch.Tensor


class Epoch(NamedTuple):
    """What one epoch came to; losses in nats per picture, accuracies as shares."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


class Result(NamedTuple):
    """What a run came to: its last epoch's numbers, how often the step was compiled, where the picture lies."""

    train_loss: float
    train_accuracy: float
    test_accuracy: float
    compiles: int
    picture: Path


def load_data():
    """A fixed split, the same for every seed of a run: three quarters to train on, one quarter held out."""
    digits = load_digits()
    x = (digits.images[:, None] / 16.0).astype(np.float32)
    parts = train_test_split(x, digits.target, test_size=0.25, stratify=digits.target, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return Data(train_x, train_y), Data(test_x, test_y)


def make_model():
    """A convolutional network of 10 026 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model, batch, key):
    """Cross entropy as a sum over the rows with its weight, never as a mean; the right answers beside it."""
    x, y = batch
    logits = model(x)
    right = (logits.argmax(-1) == y).sum()
    total = functional.cross_entropy(logits, y, reduction="sum")
    return ps.Loss(total, weight=len(y), metrics={"accuracy": ps.Sum(right, len(y))})


def make_step(model, updates):
    """The step: what happens to a batch, in order."""
    rate = ps.warmup_cosine(peak=1e-2, warmup=updates // 10, total=updates)
    return ps.compose(
        ps.split_batch(2),
        ps.forward(loss, model),
        ps.backward(),
        ps.accumulate(),
        ps.clip(max_norm=1.0),
        ps.step(ps.adamw(rate, weight_decay=0.05)),
    )


def batches(data, seed, epoch):
    """The rows in an order of this epoch. An incomplete last batch is dropped: one form of batch, one compile."""
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(len(data.y)))
    for rows in order.split(BATCH):
        if len(rows) == BATCH:
            yield data.x[rows], data.y[rows]


def purestep_check():
    """What ``purestep check examples/digits.py`` asks: the step, a first state and a batch of real digits."""
    torch.manual_seed(0)
    train_data, _ = load_data()
    model = make_model()
    step = make_step(model, updates=100)
    x, y = train_data
    return step, ps.init(model, step, seed=0), (x[:BATCH], y[:BATCH])


def train_epoch(fast, state, loader, bar):
    """One pass: the new state, and loss and accuracy over all its rows.

    The sums stay tensors until the end, so that no step waits for a number to be read.
    """
    losses = right = weight = torch.zeros(())
    for batch in loader:
        state, metrics = fast(state, batch)
        losses = losses + metrics["loss"] * metrics["weight"]
        right = right + metrics["accuracy"] * metrics["weight"]
        weight = weight + metrics["weight"]
        bar.update()
    return state, float(losses / weight), float(right / weight)


@torch.no_grad()
def evaluate(model, state, data):
    """Loss and accuracy of the state's params on data. The step has a copy of the model; this one is free to use."""
    model.load_state_dict(ps.state_dict(state))
    model.eval()
    logits = model(data.x)
    return float(functional.cross_entropy(logits, data.y)), float((logits.argmax(-1) == data.y).float().mean())


def train(options):
    """The whole run: an ``Epoch`` for each pass, and how often the step was compiled."""
    train_data, test_data = load_data()
    per_epoch = len(train_data.y) // BATCH
    torch.manual_seed(options.seed)
    model = make_model()
    step = make_step(model, options.epochs * per_epoch)
    state = ps.init(model, step, seed=options.seed)
    device = ps.devices.cpu(threads=1)  # enough for so small a model, and the bits of a result depend on how many
    fast = ps.jit(step, donate=True, device=device, backend=options.backend)
    history = []
    print(f"{len(train_data.y)} digits to train on, {len(test_data.y)} held out; the first step is compiled")
    with tqdm(total=options.epochs * per_epoch, unit="step") as bar:
        for epoch in range(options.epochs):
            state, *trained = train_epoch(fast, state, batches(train_data, options.seed, epoch), bar)
            history.append(Epoch(*trained, *evaluate(model, state, test_data)))
            bar.write(describe(f"epoch {epoch + 1:2d}", history[-1]))
    return history, fast.compiles


def describe(label, epoch):
    """One line of numbers."""
    return (
        f"{label}   train loss {epoch.train_loss:.4f}   train accuracy {epoch.train_accuracy:.4f}   "
        f"test accuracy {epoch.test_accuracy:.4f}"
    )


def draw(history, path):
    """The curves of loss and accuracy as a picture."""
    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    figure.suptitle("Reading handwritten digits", fontsize=14, weight="bold")
    left, right = figure.subplots(1, 2)
    draw_curves(left, history, "loss", "{:.4f}")
    left.set(title="Loss", ylabel="cross entropy, nats per digit (log scale)", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    draw_curves(right, history, "accuracy", "{:.1%}")
    lowest = min(0.9, *(epoch.test_accuracy for epoch in history))  # training may start far below
    right.set(title="Accuracy", ylabel="share of digits read right", ylim=(lowest - 0.01, 1.005))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    note = "Training: mean over the epoch while it runs, with dropout. Test: held-out digits after the epoch, without."
    figure.supxlabel(note, fontsize=9, color="0.35")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_curves(axes, history, what, form):
    """Training and held-out curve of one quantity; the legend tells where each ends."""
    epochs = range(1, len(history) + 1)
    for part, color, style in (("train", "#0072b2", "--"), ("test", "#d55e00", "-")):
        values = [getattr(epoch, f"{part}_{what}") for epoch in history]
        label = f"{part}, at the end {form.format(values[-1])}"
        axes.plot(epochs, values, style, color=color, linewidth=2, marker="o", markersize=4, label=label)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False)


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "digits.png", help="the picture")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    history, compiles = train(options)
    draw(history, options.out)
    last = history[-1]
    print(describe("at the end", last))
    print(f"compiled {compiles} {'time' if compiles == 1 else 'times'}")
    print(f"curves in {options.out}")
    return Result(last.train_loss, last.train_accuracy, last.test_accuracy, compiles, options.out)


if __name__ == "__main__":
    main()
