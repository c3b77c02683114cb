"""The models, data and losses on which every peer is measured.

Each is a plain torch module with a batch of made-up data and a mean loss; a peer in another framework restates it with the
same parameters.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import attrs
import torch
from torch import nn
from torch.nn import functional

__all__ = ["CLIP", "DECAY", "RATE", "WORKLOADS", "Workload", "mean_loss"]

RATE, DECAY, CLIP = 1e-3, 1e-2, 1.0  # AdamW and clipping by the global norm, the same for all


@attrs.frozen
class Workload:
    """Something to train.

    Attributes:
        name: short, as in tables.
        about: a line for the reader.
        model: makes the module.
        batch: makes ``(x, y)`` from a generator.
        micro: how many microbatches a batch is cut into.
        steps: how many steps, on a batch each, are asked for in one call.
    """

    name: str
    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    micro: int = 1
    steps: int = 1

    def make(self):
        """The module with its first values, the same at every call."""
        torch.manual_seed(0)
        return self.model()

    def batches(self, count):
        """The first batches, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        return [self.batch(generator) for _ in range(count)]


def mean_loss(model, batch):
    """Cross entropy, averaged over rows or tokens."""
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _rows(count, width, classes=10):
    def batch(generator):
        x = torch.randn(count, width, generator=generator)
        return x, torch.randint(classes, (count,), generator=generator)

    return batch


def _mlp(*widths):
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ResNet(nn.Module):
    """A residual network for pictures of 8 x 8: a stem, three blocks of two convolutions, a linear head."""

    def __init__(self, channels=32, blocks=3):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList(_Block(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        """Logits of pictures."""
        x = functional.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(inner)))


def _pictures(generator):
    return torch.randn(64, 1, 8, 8, generator=generator), torch.randint(10, (64,), generator=generator)


VOCABULARY, LENGTH = 256, 128


class Gpt(nn.Module):
    """A decoder of four layers, width 128, four heads, with learned positions and untied output."""

    def __init__(self, width=128, layers=4, heads=4):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Logits of the next token at every place."""
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


def _tokens(rows):
    def batch(generator):
        text = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


class Gru(nn.Module):
    """A recurrent classifier: one GRU layer, a linear head on its last state."""

    def __init__(self, inputs=32, width=128):
        super().__init__()
        self.gru = nn.GRU(inputs, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Logits of sequences."""
        return self.head(self.gru(x)[0][:, -1])


def _sequences(generator):
    return torch.randn(32, 32, 32, generator=generator), torch.randint(10, (32,), generator=generator)


class Deep(nn.Module):
    """200 small residual layers: 400 parameters and a head."""

    def __init__(self, width=16, layers=200):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = 1 / math.sqrt(layers)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Logits of rows."""
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return self.head(x)


WORKLOADS = {
    load.name: load
    for load in (
        Workload("tiny", "MLP of 2 x 32 on 32 rows: bound by dispatch", lambda: _mlp(16, 32, 32, 10), _rows(32, 16)),
        Workload("mlp", "MLP of 4 x 256 on 64 rows: bound by memory", lambda: _mlp(*[256] * 5, 10), _rows(64, 256)),
        Workload("conv", "ResNet with BatchNorm on 64 pictures of 8 x 8", ResNet, _pictures),
        Workload("gpt", "decoder, 4 layers, width 128, 8 rows of 128 tokens", Gpt, _tokens(8)),
        Workload("rnn", "GRU of width 128 on 32 sequences of 32", Gru, _sequences),
        Workload("leaves", "200 small layers, 402 parameters, 8 rows", Deep, _rows(8, 16)),
        Workload("accumulate", "gpt in 8 microbatches of 8 rows", Gpt, _tokens(64), micro=8),
        Workload("scan", "tiny, 16 steps in one call", lambda: _mlp(16, 32, 32, 10), _rows(32, 16), steps=16),
    )
}
