"""What a property says when it does not hold, and how it is tried over generated inputs."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...state.errors import PurestepError
from ...state.spec import spec
from ...state.tree import as_tensors, leaves_with_paths
from ..compose import Step
from ..jit import jit
from ..jitted import Jitted
from .difference import Difference

__all__ = ["NotAskedError", "PropertyError", "for_each", "plain_step", "undonated"]


class NotAskedError(ValueError):
    """A property cannot be asked of this step and input: the message says why."""


class PropertyError(PurestepError, AssertionError):
    """A property does not hold.

    Attributes:
        property: its name, such as ``"pure"``.
        why: what was found.
        concern: where in the step it was first seen, if that is known.
        difference: the first differing element, if there is one.
        smallest: the smallest input that shows it, in words, if inputs were generated.
        hint: what to do.
    """

    def __init__(
        self,
        property: str,
        why: str,
        *,
        concern: str | Callable[[], str | None] | None = None,
        difference: Difference | None = None,
        hint: str = "",
    ) -> None:
        self.property, self.why, self.difference, self.hint = property, why, difference, hint
        self._concern = concern
        self.smallest: str | None = None
        super().__init__(why)

    @builtins.property
    def concern(self) -> str | None:
        """Where in the step it was first seen; found when first asked for, since that runs the step again."""
        if callable(self._concern):
            self._concern = self._concern()
        return self._concern

    @builtins.property
    def found(self) -> str:
        """All that was found, without what to do about it."""
        parts = [
            f"not {self.property}: {self.why}",
            f"first seen at {self.concern}" if self.concern else "",
            str(self.difference) if self.difference else "",
            f"smallest input found: {self.smallest}" if self.smallest else "",
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        return f"{self.found}; {self.hint}" if self.hint else self.found


def for_each(check: Callable[..., None], *given: Any, examples: int) -> None:
    """Run a check on what is given; where that is a hypothesis strategy, on what it generates, down to a smallest case.

    Raises:
        PropertyError: from the check, with the smallest input.
    """
    if not any(_is_strategy(value) for value in given):
        check(*map(as_tensors, given))
        return
    import hypothesis
    import hypothesis.strategies as st

    last: list[Any] = []

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.tuples(*(value if _is_strategy(value) else st.just(value) for value in given)))
    def over(values: tuple[Any, ...]) -> None:
        last[:] = map(as_tensors, values)
        check(*last)

    try:
        over()
    except PropertyError as error:
        generated = [value for value, source in zip(last, given, strict=True) if _is_strategy(source)]
        error.smallest = ", ".join(map(_described, generated))
        raise


def plain_step(step: Step | Jitted) -> Step:
    """The composed step.

    Raises:
        TypeError: if it is neither a composed nor a compiled step.
    """
    if not isinstance(step, (Step, Jitted)):
        raise TypeError(f"step must come from ps.compose or ps.jit, got {type(step).__name__}")
    return step.step if isinstance(step, Jitted) else step


def undonated(step: Step | Jitted) -> Step | Jitted:
    """The step itself; a compiled one that donates is compiled again without, for a property needs its inputs after."""
    plain_step(step)
    if isinstance(step, Jitted) and step.donate:
        return jit(step.step, device=step.device, backend=step.backend)
    return step


def _is_strategy(value: Any) -> bool:
    return type(value).__module__.startswith("hypothesis.")


_SHORT = 8  # leaves up to this size are written out


def _described(value: Any) -> str:
    words = []
    for path, leaf in leaves_with_paths(value, "x")[:_SHORT]:
        small = isinstance(leaf, Tensor) and leaf.numel() <= _SHORT
        words.append(f"{path} = {leaf.tolist() if small else spec(leaf)}")
    return "{" + "; ".join(words) + "}"
