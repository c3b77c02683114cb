"""The command ``purestep``.

``check`` asks a script's step for its properties, ``bench`` measures how fast it is, ``diff`` compares the digests of two
runs.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

__all__ = ["bench", "check", "diff", "main"]


def main() -> None:
    """Run the command line, and exit with 0, with 1 where something does not hold, with 2 where it cannot be asked."""
    import tyro

    commands: dict[str, Any] = {"check": check, "bench": bench, "diff": diff}
    sys.exit(tyro.extras.subcommand_cli_from_dict(commands, prog="purestep", description=__doc__))


def check(
    script: Path,
    /,
    *,
    step: str = "",
    state: str = "",
    batch: str = "",
    backend: tuple[Literal["aot_eager", "inductor"], ...] = ("aot_eager",),
    only: tuple[str, ...] = (),
    processes: int = 0,
    fix_hint: bool = False,
) -> int:
    """Ask every property of the step in a script, and print what holds, what does not and why.

    The script is run. Then its step, state and batch are looked up: what a function ``purestep_check()`` of the script
    returns as ``(step, state, batch)``, or its variables: the only compiled or composed step, the only state, and ``batch``
    or the first item of ``batches`` or ``loader``.

    Args:
        script: the file.
        step: name of the step's variable.
        state: name of the state's variable.
        batch: name of the batch's variable.
        backend: what compiled forms are compared with the eager one.
        only: names of properties; all by default.
        processes: in how many other processes the step must give the same bits.
        fix_hint: print what to do about what fails.
    """
    from rich.console import Console

    console = Console()
    try:
        found, _ = _look_up(script, {"step": step, "state": state, "batch": batch})
        report = _asked(found, backend, only, processes)
    except (LookupError, ValueError) as error:
        console.print(f"{script}: {error}", markup=False, highlight=False)
        return 2
    console.print(_table(report, fix_hint=fix_hint))
    return 0 if report.ok else 1


def bench(
    script: Path,
    /,
    *,
    step: str = "",
    state: str = "",
    batch: str = "",
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
    rounds: int = 9,
    seconds: float = 0.2,
    start: bool = True,
    json: Path | None = None,
    picture: Path | None = None,
) -> int:
    """Measure the step in a script: its time against other ways to train, its memory, its start, and where its time goes.

    The step, state and batch are looked up as ``check`` does. Where the script has a function ``purestep_against()``, what
    it returns is measured beside the step: functions of no argument that each train one step, by name, the first as the
    baseline. Without it the baseline is the step run eagerly.

    Args:
        script: the file.
        step: name of the step's variable.
        state: name of the state's variable.
        batch: name of the batch's variable.
        backend: how a step that the script did not compile is compiled.
        rounds: how many turns each has.
        seconds: how long a turn is.
        start: measure the time to the first step too, which compiles the step twice more.
        json: where to write the figures.
        picture: where to draw them, such as bench.png.
    """
    from rich.console import Console

    from .core.benchmark import benchmark
    from .devices import cpu

    console = Console()
    try:
        (found, first, rows, _), held = _look_up(script, {"step": step, "state": state, "batch": batch})
        against = held["purestep_against"]() if callable(held.get("purestep_against")) else None
        options: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "start": start, "backend": backend}
        report = benchmark(found, first, rows, against=against, device=cpu(), **options)
    except (LookupError, ValueError, TypeError) as error:
        console.print(f"{script}: {error}", markup=False, highlight=False)
        return 2
    for part in report.parts():
        console.print(part)
    if json is not None:
        report.save(json)
    if picture is not None:
        report.draw(picture)
    return 0


def diff(run_a: Path, run_b: Path, /) -> int:
    """Compare two traces of digests, and say at which call and in which leaf the runs part.

    Args:
        run_a: a file that ``DigestTrace`` wrote, or a folder that holds one as ``digests.jsonl``.
        run_b: the other one.
    """
    from .core.properties.digest import compare_traces

    try:
        found = compare_traces(*(path / "digests.jsonl" if path.is_dir() else path for path in (run_a, run_b)))
    except ValueError as error:
        print(error)
        return 2
    print(found or "the runs agree in every call that both have")
    return 0 if found is None else 1


def _asked(found: tuple[Any, Any, Any, list[Any]], backends: Any, only: tuple[str, ...], processes: int) -> Any:
    import attrs

    from .core.properties import PropertyError, Report, Result, assert_deterministic
    from .core.properties import check as check_step
    from .devices import cpu

    step, state, batch, batches = found
    report = check_step(step, state, batch, batches=batches, device=cpu(), backends=backends, only=only)
    if processes:
        try:
            assert_deterministic(step, state, batch, runs=1, processes=processes)
            extra = Result(f"the same in {processes} more processes", "holds")
        except PropertyError as error:
            extra = Result(f"the same in {processes} more processes", "fails", error.found, error.hint)
        report = attrs.evolve(report, results=(*report.results, extra))
    assert isinstance(report, Report)
    return report


def _look_up(script: Path, names: dict[str, str]) -> tuple[tuple[Any, Any, Any, list[Any]], dict[str, Any]]:
    """The script's step, state, batch and further batches; and all its variables.

    Raises:
        LookupError: naming what was not found, and how to say where it is.
    """
    if not script.exists():
        raise LookupError("there is no such file")
    held = _run(script)
    return _chosen(held, names), held


def _chosen(held: dict[str, Any], names: dict[str, str]) -> tuple[Any, Any, Any, list[Any]]:
    from .core.compose import Step
    from .core.jitted import Jitted
    from .state.record import TrainState

    if callable(held.get("purestep_check")):
        step, state, batch = held["purestep_check"]()
        return step, state, batch, []
    step = _named(held, names["step"], "step", Jitted, Step)
    state = _named(held, names["state"], "state", TrainState)
    name = names["batch"] or next((n for n in ("batch", "batches", "loader") if n in held), "")
    if name not in held:
        raise LookupError("it has no batch, batches or loader; name its batch with --batch, or define purestep_check()")
    if name in ("batches", "loader") and isinstance(held[name], Iterable):
        return step, state, *_first_batches(held[name], name)
    return step, state, held[name], []


def _first_batches(loader: Iterable[Any], name: str) -> tuple[Any, list[Any]]:
    """The first batch, and the next few of its form: an incomplete last one is no fault."""
    from .state.tree import as_tensors, flatten

    def form(batch: Any) -> Any:
        values, treedef = flatten(batch)
        return treedef, [getattr(leaf, "shape", None) for leaf in values]

    found = [as_tensors(batch) for batch in islice(loader, 4)]
    if not found:
        raise LookupError(f"its {name} gives no batch")
    return found[0], [batch for batch in found if form(batch) == form(found[0])]


def _run(script: Path) -> dict[str, Any]:
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script)], [str(script.resolve().parent)]
    try:
        return runpy.run_path(str(script), run_name="purestep_check")
    except Exception as error:
        raise LookupError(f"it raises {type(error).__name__}: {error}") from error
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


def _named(held: dict[str, Any], name: str, what: str, *kinds: type) -> Any:
    if name:
        if name not in held:
            raise LookupError(f"it has no variable {name!r} for --{what}")
        return held[name]
    for kind in kinds:
        found = {id(value): variable for variable, value in held.items() if isinstance(value, kind)}
        if len(found) == 1:
            return held[next(iter(found.values()))]
        if len(found) > 1:
            raise LookupError(f"it has several: {', '.join(found.values())}; choose one with --{what}")
    raise LookupError(
        f"it has no {what}; name it with --{what}, or define purestep_check() that returns step, state, batch"
    )


def _table(report: Any, *, fix_hint: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("property", "verdict", "why", *(["what to do"] if fix_hint else []), "seconds")
    colours = {"holds": "green", "fails": "red", "not asked": "yellow"}
    for result in report.results:
        hint = [Text(result.hint)] if fix_hint else []
        verdict = Text(result.verdict, style=colours[result.verdict])
        table.add_row(Text(result.name), verdict, Text(result.why), *hint, f"{result.seconds:.2f}")
    return table


if __name__ == "__main__":
    main()
