"""Jit: a step traced over flat leaves, compiled once per form of its inputs, called with little in between."""

from __future__ import annotations

import threading
import warnings
from typing import Any, get_args

import attrs
import torch
from torch import Tensor

from ..state.errors import BatchError, DonatedError, PurestepError, StateError
from ..state.record import FlatState, TrainState, consume, flat_of, lazy_state
from ..state.tree import TreeDef, flatten
from ..steps.faults import raise_fault
from .checks import check_batch, check_state, refuse_inference_mode
from .compose import Step
from .device import Device
from .form import ambient, forms, static_change
from .lowering.packing import Packing
from .program import Backend, Program, build

__all__ = ["Jitted", "jit"]

Metrics = dict[str, Tensor]


def jit(step: Step, *, device: Device, donate: bool = False, backend: Backend = "inductor") -> Jitted:
    """Compile a step: the same function, ``(state, batch) -> (state, metrics)``, in one graph.

    It is traced and compiled at the first call and again for a batch of another form, never for other values: a moving
    rate, another step, other content compile nothing.

    Args:
        step: from ``compose``.
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
    if not isinstance(step, Step):
        raise TypeError(f"step must come from ps.compose, got {type(step).__name__}")
    if not isinstance(device, Device):
        raise TypeError(f"device must be a device such as ps.devices.cpu(), got {device!r}")
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
    return Jitted(step, device, donate=donate, backend=backend)


class Jitted:
    """A compiled step; see :func:`jit`.

    Attributes:
        step: the step it was made of.
        compiles: how often it was compiled (or traced).
    """

    def __init__(self, step: Step, device: Device, *, donate: bool, backend: Backend) -> None:
        self.step, self.device, self.donate, self.backend = step, device, donate, backend
        self.compiles = 0
        self._programs: dict[Any, Program] = {}
        self._tokens: dict[Any, object] = {}
        self._packings: dict[object, Packing | None] = {}
        self._running, self._building = threading.Lock(), threading.Lock()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step. With ``donate`` the given state is used up, unless an error says otherwise.

        Raises:
            DonatedError: if the state was donated before, another thread is inside a donated call, or the donated state
                was lost inside the graph.
            StateError: if the state does not fit the step.
            BatchError: if the batch cannot be used.
            TraceError: if the step cannot be one graph.
            CompileError: if it cannot be compiled here.
            NumericsError: if a weight or a rate is not a usable number.
        """
        if not self.donate:
            return self._call(state, batch)
        if not self._running.acquire(blocking=False):
            raise DonatedError(
                "this step is running in another thread: two calls at once would write into the same donated tensors"
            )
        try:
            return self._call(state, batch)
        finally:
            self._running.release()

    def _call(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        refuse_inference_mode()
        flat = self._known(state)
        with self.device.running():
            program, values, treedef = self._found(flat, batch) or self._placed(state, flat, batch)
            tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
            if self.donate:
                _refuse_lent(flat, values, treedef)
            given = flat
            if program.packing is not None and flat.inputs is flat.leaves:
                flat = _packed(flat, program.packing)
            leaves, metrics = self._run(program, state, flat, tensors)
        if self.device.synchronous:
            raise_fault(metrics)
        if not self.donate:
            return lazy_state(FlatState(leaves, flat.treedef, flat.token, flat.storages)), metrics
        written = (given.leaves[place] for place in program.outputs.changed)
        consume(state, "this state was donated to a compiled step; use the state that the step returned", written)
        return lazy_state(flat if flat.exclusive else attrs.evolve(flat, exclusive=True)), metrics

    def _found(self, flat: FlatState, batch: Any) -> tuple[Program, list[Any], TreeDef] | None:
        """The program for a batch that lies where it was compiled for, as nearly all do."""
        values, treedef = flatten(batch)
        try:
            program = self._programs.get((flat.token, treedef, forms(values), ambient()))
        except BatchError:
            return None  # a leaf that is no tensor yet
        return None if program is None else (program, values, treedef)

    def _placed(self, state: TrainState, flat: FlatState, batch: Any) -> tuple[Program, list[Any], TreeDef]:
        """The program for a batch once it lies on the device; compiled where its form is met for the first time."""
        values, treedef = flatten(self.device.place(batch))
        if self.donate:
            _refuse_lent(flat, values, treedef)
        key = (flat.token, treedef, forms(values), ambient())
        return self._programs.get(key) or self._build(key, state, flat, values), values, treedef

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        return Jitted(self.step, self.device, donate=self.donate, backend=self.backend)

    def _known(self, state: TrainState) -> FlatState:
        """The flat state with a token of its form; one that this step returned is not looked at again."""
        flat = flat_of(state) if isinstance(state, TrainState) else None
        if flat is not None and flat.token is not None and self._tokens.get(flat.token) is flat.token:
            return flat
        check_state(self.step, state)
        flat = FlatState(*flatten(state))
        storages = _own_storages(flat) if self.donate else frozenset[int]()
        token = self._tokens.setdefault((flat.treedef, forms(flat.leaves)), object())
        self._tokens[token] = token
        return FlatState(flat.leaves, flat.treedef, token, storages)

    def _build(self, key: Any, state: TrainState, flat: FlatState, values: list[Any]) -> Program:
        """Compile for a form of inputs met for the first time."""
        with self._building:
            if key in self._programs:
                return self._programs[key]
            treedef = key[1]
            check_batch(state, treedef.unflatten(values))
            self._warn_static(key)
            program = build(
                self.step,
                self.device,
                self.backend,
                flat,
                (values, treedef),
                donate=self.donate,
                packing=self._packings.get(flat.token),
            )
            self._programs[key], self._packings[flat.token] = program, program.packing
            self.compiles += 1
            return program

    def _warn_static(self, key: Any) -> None:
        token, treedef, form, settings = key
        for other in self._programs:
            if (other[0], other[1], other[3]) != (token, treedef, settings):
                continue
            change = static_change(other[2], form)
            if change is not None:
                path = treedef.accessors()[change[0]].codify("batch")
                warnings.warn(
                    f"{path} is a Python value that changed {change[1]}: a compiled step is compiled again for each value. "
                    "Make it a 0-d tensor",
                    RuntimeWarning,
                    stacklevel=5,
                )
                return

    def _run(
        self, program: Program, state: TrainState, flat: FlatState, tensors: list[Tensor]
    ) -> tuple[list[Tensor], Metrics]:
        try:
            return program.run(flat, tensors, donate=self.donate)
        except PurestepError:
            raise  # refused while Python still ran, before anything was written
        except BaseException as error:
            # What is not compiled writes at its very end; what failed before has changed nothing.
            if not self.donate or self.backend != "inductor":
                raise
            reason = "this state was lost: a compiled step failed after it was donated"
            consume(state, reason, (flat.leaves[place] for place in program.outputs.changed))
            raise DonatedError(f"{reason} ({error}); go on from a checkpoint or a ps.copy_state(...)") from error


def _packed(flat: FlatState, packing: Packing) -> FlatState:
    """The state with its small leaves side by side, in memory of its own."""
    leaves, inputs = packing.pack(flat.leaves)
    storages = frozenset(leaf.untyped_storage().data_ptr() for leaf in inputs if leaf.numel())
    return attrs.evolve(flat, leaves=leaves, inputs=inputs, storages=storages)


def _own_storages(flat: FlatState) -> frozenset[int]:
    """The memory of the leaves; two leaves in one storage cannot both be written in place.

    Raises:
        StateError: naming both.
    """
    owners: dict[int, int] = {}
    for index, leaf in enumerate(flat.leaves):
        if not leaf.numel():
            continue
        other = owners.setdefault(leaf.untyped_storage().data_ptr(), index)
        if other != index:
            one, two = (flat.treedef.accessors()[i].codify("state") for i in (other, index))
            raise StateError(
                f"{one} and {two} share one storage, so the state cannot be donated; give each a tensor of its own, as "
                "ps.copy_state(state) does"
            )
    return frozenset(owners)


def _refuse_lent(flat: FlatState, values: list[Any], treedef: TreeDef) -> None:
    """A batch that is a view of the donated state would change while it is read.

    Raises:
        BatchError: naming its leaf.
    """
    for index, leaf in enumerate(values):
        if (
            isinstance(leaf, Tensor)
            and leaf.layout == torch.strided
            and leaf.untyped_storage().data_ptr() in flat.storages
        ):
            path = treedef.accessors()[index].codify("batch")
            raise BatchError(f"{path} shares its storage with the state that is donated; hand in a clone")
