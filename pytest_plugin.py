"""The pytest plugin: the fixture ``purestep_check``, the marker ``deterministic``, the option ``--purestep-runs``.

Torch is imported when one of them is used, not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["purestep_check"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often a test marked ``deterministic`` is run."""
    parser.getgroup("purestep").addoption(
        "--purestep-runs", type=int, default=2, metavar="N", help="runs of a test marked deterministic (default: 2)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "deterministic: run several times under other global seeds; what it returns must have the same bits"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test several times, and compare what it returns."""
    if pyfuncitem.get_closest_marker("deterministic") is None:
        return None
    from .core.properties.difference import first_difference
    from .core.properties.world import disturb

    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail("a test marked deterministic must be a plain function", pytrace=False)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    first: Any = None
    for run in range(max(2, pyfuncitem.config.getoption("--purestep-runs"))):
        disturb(run)
        found = pyfuncitem.obj(**arguments)
        if found is None:
            pytest.fail("a test marked deterministic returns what is compared: a tree of tensors", pytrace=False)
        first = found if run == 0 else first
        difference = first_difference(first, found, "result")
        if difference is not None:
            pytest.fail(f"run {run + 1} gave other bits than the first: {difference}", pytrace=False)
    return True


@pytest.fixture
def purestep_check() -> Callable[..., Any]:
    """A function ``(step, state, batch, **options) -> Report`` that fails the test if a property does not hold.

    Options are those of ``ps.properties.check``.
    """

    def check(step: Any, state: Any, batch: Any, **options: Any) -> Any:
        from .core.properties import check as check_step

        report = check_step(step, state, batch, **options)
        if not report.ok:
            hints = "\n".join(f"{r.name}: {r.hint}" for r in report.results if r.verdict == "fails" and r.hint)
            pytest.fail(f"the step does not hold what is asked of it:\n{report}\n{hints}", pytrace=False)
        return report

    return check
