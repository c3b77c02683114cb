"""Several compiled steps in one call: one check of all the batches, then the program once for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..state.errors import BatchError, NumericsError
from ..state.record import FlatState, TrainState
from ..state.tree import flatten
from .checks import refuse_inference_mode
from .device import Device
from .donation import refuse_lent
from .form import ambient, forms
from .jitted import Compiled, Metrics
from .program import Backend, Program
from .scan_steps import ScanSteps, refuse_other_count, stopped_at

__all__ = ["JittedScan"]


class JittedScan(Compiled):
    """Several compiled steps in one call; made by ``jit`` from what ``scan_steps`` gives.

    Attributes:
        scan: the steps.
    """

    def __init__(self, scan: ScanSteps, device: Device, *, donate: bool, backend: Backend) -> None:
        super().__init__(scan.step, device, donate=donate, backend=backend)
        self.scan = scan
        self._programs_of_lists: dict[Any, Program] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> JittedScan:
        return JittedScan(self.scan, self.device, donate=self.donate, backend=self.backend)

    def _call(self, state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, Metrics]:
        refuse_inference_mode()
        refuse_other_count(batches, self.scan.count)
        given = flat = self._known(state)
        done: list[Sequence[Tensor]] = []
        with self.device.running():
            program, rows = self._found_all(given, batches) or self._placed_all(state, given, batches)
            try:
                for values in rows:
                    flat, measured = self._advance(program, state, flat, values)
                    done.append(measured)
            except NumericsError as error:
                if not done:
                    raise
                reached = self._handed_on(program, state, given, flat)
                raise stopped_at(len(done), self.scan.count, error, reached) from error
        rows_of = zip(program.outputs.metrics, zip(*done, strict=True), strict=True)
        return self._handed_on(program, state, given, flat), {name: torch.stack(column) for name, column in rows_of}

    def _found_all(self, flat: FlatState, batches: Sequence[Any]) -> tuple[Program, list[list[Any]]] | None:
        """The program for batches that all have a form it was compiled for."""
        values, treedef = flatten(list(batches))
        try:
            program = self._programs_of_lists.get((flat.token, treedef, forms(values), ambient()))
        except BatchError:
            return None
        if program is None:
            return None
        if self.donate:
            refuse_lent(flat, values, treedef)
        width = len(values) // len(batches)
        return program, [values[i : i + width] for i in range(0, len(values), width)]

    def _placed_all(
        self, state: TrainState, flat: FlatState, batches: Sequence[Any]
    ) -> tuple[Program, list[list[Any]]]:
        """The same once they lie on the device; compiled for a new form."""
        placed = [self.device.place(batch) for batch in batches]
        first, *others = (flatten(batch) for batch in placed)
        form = forms(first[0])
        for index, (values, treedef) in enumerate(others, start=1):
            if treedef != first[1] or forms(values) != form:
                raise BatchError(
                    f"batches[{index}] has another form than batches[0]; steps in one call take batches of one form: "
                    "pad the last one, or call the step alone for it"
                )
        program, _ = self._placed(state, flat, placed[0])
        values, treedef = flatten(placed)
        if self.donate:
            refuse_lent(flat, values, treedef)
        self._programs_of_lists[flat.token, treedef, forms(values), ambient()] = program
        return program, [first[0], *(values for values, _ in others)]
