"""purestep: a functional training core for PyTorch.

The training state is one immutable record; every concern of a step is a pure function; the composed step is traced once
and compiled whole. Names are loaded when first used, so that importing purestep is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import devices as devices
    from .core import properties as properties
    from .core.benchmark.benchmark import benchmark as benchmark
    from .core.benchmark.report import StepReport as StepReport
    from .core.compose import Step as Step
    from .core.compose import compose as compose
    from .core.device import Device as Device
    from .core.init import init as init
    from .core.jit import jit as jit
    from .core.jitted import Jitted as Jitted
    from .core.properties import strategies as strategies
    from .core.properties.digest import DigestTrace as DigestTrace
    from .core.properties.explain import explain_difference as explain_difference
    from .core.properties.failure import PropertyError as PropertyError
    from .core.scan_steps import scan_steps as scan_steps
    from .state.constants import constant as constant
    from .state.distributions import bernoulli as bernoulli
    from .state.distributions import normal as normal
    from .state.distributions import uniform as uniform
    from .state.errors import BatchError as BatchError
    from .state.errors import CompileError as CompileError
    from .state.errors import ComposeError as ComposeError
    from .state.errors import DonatedError as DonatedError
    from .state.errors import LossError as LossError
    from .state.errors import NumericsError as NumericsError
    from .state.errors import PurestepError as PurestepError
    from .state.errors import PurityError as PurityError
    from .state.errors import RandomOpError as RandomOpError
    from .state.errors import StateError as StateError
    from .state.errors import TraceError as TraceError
    from .state.key import fold_in as fold_in
    from .state.key import random_key as random_key
    from .state.key import split as split
    from .state.record import Counters as Counters
    from .state.record import TrainState as TrainState
    from .state.record import copy_state as copy_state
    from .state.state_dict import load_state_dict as load_state_dict
    from .state.state_dict import state_dict as state_dict
    from .state.sums import Loss as Loss
    from .state.sums import Sum as Sum
    from .state.sums import Sums as Sums
    from .state.tree import map_leaves as map_leaves
    from .state.window import RunningWindow as RunningWindow
    from .steps.accumulate import accumulate as accumulate
    from .steps.adam import adam as adam
    from .steps.adam import adamw as adamw
    from .steps.backward import backward as backward
    from .steps.clip import clip as clip
    from .steps.clip import clip_by_norm as clip_by_norm
    from .steps.clip import clip_by_value as clip_by_value
    from .steps.concern import concern as concern
    from .steps.forward import forward as forward
    from .steps.keyed_modules import KeyedDropout as KeyedDropout
    from .steps.keyed_modules import keyed_modules as keyed_modules
    from .steps.norm import first_nonfinite as first_nonfinite
    from .steps.norm import global_norm as global_norm
    from .steps.schedule import schedule as schedule
    from .steps.schedules import constant_schedule as constant_schedule
    from .steps.schedules import cosine as cosine
    from .steps.schedules import linear as linear
    from .steps.schedules import piecewise as piecewise
    from .steps.schedules import warmup_cosine as warmup_cosine
    from .steps.sgd import sgd as sgd
    from .steps.split_batch import split_batch as split_batch
    from .steps.step import step as step
    from .steps.transform import Transformation as Transformation
    from .steps.transform import apply_updates as apply_updates
    from .steps.transform import chain as chain

__version__ = "0.1.0"

_HOMES = {
    "core.benchmark.benchmark": ("benchmark",),
    "core.benchmark.report": ("StepReport",),
    "core.compose": ("Step", "compose"),
    "core.device": ("Device",),
    "core.init": ("init",),
    "core.jit": ("jit",),
    "core.jitted": ("Jitted",),
    "core.properties.digest": ("DigestTrace",),
    "core.properties.explain": ("explain_difference",),
    "core.properties.failure": ("PropertyError",),
    "core.scan_steps": ("scan_steps",),
    "state.constants": ("constant",),
    "state.distributions": ("bernoulli", "normal", "uniform"),
    "state.errors": (
        "BatchError",
        "CompileError",
        "ComposeError",
        "DonatedError",
        "LossError",
        "NumericsError",
        "PurestepError",
        "PurityError",
        "RandomOpError",
        "StateError",
        "TraceError",
    ),
    "state.key": ("fold_in", "random_key", "split"),
    "state.record": ("Counters", "TrainState", "copy_state"),
    "state.state_dict": ("load_state_dict", "state_dict"),
    "state.sums": ("Loss", "Sum", "Sums"),
    "state.tree": ("map_leaves",),
    "state.window": ("RunningWindow",),
    "steps.accumulate": ("accumulate",),
    "steps.adam": ("adam", "adamw"),
    "steps.backward": ("backward",),
    "steps.clip": ("clip", "clip_by_norm", "clip_by_value"),
    "steps.norm": ("first_nonfinite", "global_norm"),
    "steps.concern": ("concern",),
    "steps.forward": ("forward",),
    "steps.keyed_modules": ("KeyedDropout", "keyed_modules"),
    "steps.schedule": ("schedule",),
    "steps.schedules": ("constant_schedule", "cosine", "linear", "piecewise", "warmup_cosine"),
    "steps.sgd": ("sgd",),
    "steps.split_batch": ("split_batch",),
    "steps.step": ("step",),
    "steps.transform": ("Transformation", "apply_updates", "chain"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = {"devices": "devices", "properties": "core.properties", "strategies": "core.properties.strategies"}

__all__ = [*_MODULES, *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
