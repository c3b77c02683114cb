"""A compiled step: a program per form of its inputs, called with little in between."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.fx import GraphModule

from ..state.errors import BatchError, DonatedError, PurestepError
from ..state.record import FlatState, TrainState, consume, flat_of, lazy_state
from ..state.tree import flatten
from ..steps.faults import raise_fault
from .checks import check_batch, check_state, refuse_inference_mode
from .compose import Step
from .device import Device
from .donation import own_storages, packed, refuse_lent
from .form import ambient, forms, static_change
from .lowering.packing import Packing
from .program import Backend, Program, build

__all__ = ["Compiled", "Jitted"]

Metrics = dict[str, Tensor]


class Compiled(ABC):
    """What ``jit`` makes: the programs of a step, found by the form of what they are called with.

    Attributes:
        step: the step it was made of.
        compiles: how often it was compiled (or traced).
    """

    _edit: Callable[[GraphModule], None] | None = None  # a change of the graph, where one is measured

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

    @abstractmethod
    def _call(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]: ...

    def _advance(
        self, program: Program, state: TrainState, flat: FlatState, values: list[Any]
    ) -> tuple[FlatState, Sequence[Tensor]]:
        """The flat state after one step, and its metrics in the order of their names."""
        flat = packed(flat, program.packing)
        tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
        leaves, measured = self._run(program, state, flat, tensors)
        if self.device.synchronous and int(measured[program.outputs.fault]):
            raise_fault(dict(zip(program.outputs.metrics, measured, strict=True)))
        return flat if self.donate else FlatState(leaves, flat.treedef, flat.token, flat.storages), measured

    def _handed_on(self, program: Program, state: TrainState, given: FlatState, flat: FlatState) -> TrainState:
        """The new record; with ``donate`` the old one is given up."""
        if not self.donate:
            return lazy_state(flat)
        written = (given.leaves[place] for place in program.outputs.changed)
        consume(state, "this state was donated to a compiled step; use the state that the step returned", written)
        return lazy_state(flat if flat.exclusive else attrs.evolve(flat, exclusive=True))

    def _placed(self, state: TrainState, flat: FlatState, batch: Any) -> tuple[Program, list[Any]]:
        """The program for a batch once it lies on the device; compiled where its form is met for the first time."""
        values, treedef = flatten(self.device.place(batch))
        if self.donate:
            refuse_lent(flat, values, treedef)
        key = (flat.token, treedef, forms(values), ambient())
        return self._programs.get(key) or self._build(key, state, flat, values), values

    def _known(self, state: TrainState) -> FlatState:
        """The flat state with a token of its form; one that this step returned is not looked at again."""
        flat = flat_of(state) if isinstance(state, TrainState) else None
        if flat is not None and flat.token is not None and self._tokens.get(flat.token) is flat.token:
            return flat
        check_state(self.step, state)
        flat = FlatState(*flatten(state))
        storages = own_storages(flat) if self.donate else frozenset[int]()
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
                edit=self._edit,
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
                    stacklevel=6,
                )
                return

    def _run(
        self, program: Program, state: TrainState, flat: FlatState, tensors: list[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
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


class Jitted(Compiled):
    """A compiled step; made by ``jit``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        return Jitted(self.step, self.device, donate=self.donate, backend=self.backend)

    def _call(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        refuse_inference_mode()
        given = self._known(state)
        with self.device.running():
            program, values = self._found(given, batch) or self._placed(state, given, batch)
            flat, measured = self._advance(program, state, given, values)
        metrics = dict(zip(program.outputs.metrics, measured, strict=True))
        return self._handed_on(program, state, given, flat), metrics

    def _found(self, flat: FlatState, batch: Any) -> tuple[Program, list[Any]] | None:
        """The program for a batch that lies where it was compiled for, as nearly all do."""
        values, treedef = flatten(batch)
        try:
            program = self._programs.get((flat.token, treedef, forms(values), ambient()))
        except BatchError:
            return None  # a leaf that is no tensor yet
        if program is None:
            return None
        if self.donate:
            refuse_lent(flat, values, treedef)
        return program, values
