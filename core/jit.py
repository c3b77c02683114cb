"""Jit: a step traced over flat leaves and compiled whole, once per form of its inputs."""

from __future__ import annotations

from typing import get_args, overload

from .compose import Step
from .device import Device
from .jitted import Jitted
from .jitted_scan import JittedScan
from .program import Backend
from .scan_steps import ScanSteps

__all__ = ["jit"]


@overload
def jit(step: Step, *, device: Device, donate: bool = False, backend: Backend = "inductor") -> Jitted: ...


@overload
def jit(step: ScanSteps, *, device: Device, donate: bool = False, backend: Backend = "inductor") -> JittedScan: ...


def jit(
    step: Step | ScanSteps, *, device: Device, donate: bool = False, backend: Backend = "inductor"
) -> Jitted | JittedScan:
    """Compile a step: the same function, ``(state, batch) -> (state, metrics)``, in one graph.

    It is traced and compiled at the first call and again for a batch of another form, never for other values: a moving
    rate, another step, other content compile nothing.

    Args:
        step: from ``compose``, or several in one call from ``scan_steps``.
        device: where it runs, such as ``ps.devices.cpu()``.
        donate: write the new state into the old one's tensors. The old record is given up; its fields raise.
        backend: ``"inductor"`` compiles to machine code, ``"aot_eager"`` runs the traced graph, ``"eager"`` the Python.

    Returns:
        The compiled step; ``compiles`` counts its compilations.

    Raises:
        TypeError: if ``step`` is not composed or ``device`` is not a device.
        ValueError: if ``backend`` is unknown.

    Example:
        >>> import torch, purestep as ps
        >>> def loss(w, x, key):
        ...     return ps.Loss((w * x).sum(), weight=len(x))
        >>> step = ps.compose(ps.forward(loss), ps.backward(), ps.accumulate(), ps.step(ps.sgd(1.0)))
        >>> fast = ps.jit(step, device=ps.devices.cpu(), backend="aot_eager")
        >>> state, metrics = fast(ps.init(torch.tensor(0.0), step, seed=0), torch.tensor([1.0, 3.0]))
        >>> float(state.params), fast.compiles
        (-2.0, 1)
    """
    if not isinstance(step, (Step, ScanSteps)):
        raise TypeError(f"step must come from ps.compose, got {type(step).__name__}")
    if not isinstance(device, Device):
        raise TypeError(f"device must be a device such as ps.devices.cpu(), got {device!r}")
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
    if isinstance(step, ScanSteps):
        return JittedScan(step, device, donate=donate, backend=backend)
    return Jitted(step, device, donate=donate, backend=backend)
