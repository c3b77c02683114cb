"""What a benchmark found: as a table, as JSON, as a picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Row", "StepReport"]


@attrs.frozen
class Row:
    """One contestant.

    Attributes:
        name: of it.
        median: seconds per step.
        spread: distance of the quartiles, as a share of the median.
        ratio: its median over the baseline's.
        peak: bytes that torch held at most during a step, beyond what it held before.
        noisy: whether the spread is too wide to trust the median (over a tenth of it).
        times: seconds per step, one for each turn.
    """

    name: str
    median: float
    spread: float
    ratio: float
    peak: int
    noisy: bool
    times: tuple[float, ...]


@attrs.frozen
class StepReport:
    """What a benchmark of a step found.

    Attributes:
        rows: the contestants, ours first; the second is the baseline.
        state_bytes: size of the state.
        compiles: how often the step was compiled while it was measured.
        first_cold: seconds to the first step with nothing compiled; ``None`` where it was not measured.
        first_warm: the same with what another process left in the compile cache on the disk.
        overhead: seconds of a call that are not arithmetic; ``None`` where the backend does not compile.
        shares: of each concern in the time of the eager step.
    """

    rows: tuple[Row, ...]
    state_bytes: int
    compiles: int
    first_cold: float | None
    first_warm: float | None
    overhead: float | None
    shares: dict[str, float]

    @property
    def noisy(self) -> bool:
        """Whether any of the measurements is too noisy to be trusted."""
        return any(row.noisy for row in self.rows)

    def __str__(self) -> str:
        from rich.console import Console

        page = io.StringIO()
        console = Console(file=page, width=110)
        for part in self.parts():
            console.print(part)
        return page.getvalue().rstrip()

    def parts(self) -> list[Any]:
        """The table and the lines below it, for a rich console."""
        from rich.table import Table

        table = Table("", "median", "spread", f"ratio to {self.rows[1].name}", "peak memory", "")
        for row in self.rows:
            note = "noisy" if row.noisy else ""
            cells = (milliseconds(row.median), f"{row.spread:.0%}", f"{row.ratio:.2f}", mebibytes(row.peak), note)
            table.add_row(row.name, *cells)
        return [table, *self._lines()]

    def _lines(self) -> list[str]:
        lines = [f"state {mebibytes(self.state_bytes)}; compiled {self.compiles} time(s)"]
        if self.first_cold is not None and self.first_warm is not None:
            lines.append(f"first step after {self.first_cold:.1f} s cold, {self.first_warm:.1f} s with a warm cache")
        if self.overhead is not None:
            lines.append(f"host overhead {milliseconds(self.overhead)} a step: the call with the arithmetic taken out")
        named = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
        lines.append(f"the eager step's time: {named}")
        if self.noisy:
            lines.append(
                "the machine was busy: a spread of over a tenth is marked noisy, measure again before you conclude"
            )
        return lines

    def save(self, path: str | Path) -> None:
        """Write the report as JSON; times in seconds, sizes in bytes."""
        Path(path).write_text(json.dumps(attrs.asdict(self), indent=1) + "\n")

    def draw(self, path: str | Path) -> None:
        """Draw the contestants' times and the concerns' shares; the format follows the path's suffix."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 1.6 + 0.45 * max(len(self.rows), len(self.shares))), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        names = [row.name for row in self.rows]
        left.barh(names, [row.median * 1e3 for row in self.rows], color=["#0072b2"] + ["0.7"] * (len(names) - 1))
        for place, row in enumerate(self.rows):
            words = f"  {milliseconds(row.median)}, x{row.ratio:.2f}"
            left.text(max(row.times) * 1e3, place, words, va="center", fontsize=9)
            left.plot([time * 1e3 for time in row.times], [place] * len(row.times), "|", color="black", markersize=9)
        left.set(title="Time of a step", xlabel="milliseconds; a mark for each turn")
        shared = right.barh(list(self.shares), [share * 100 for share in self.shares.values()], color="#009e73")
        right.bar_label(shared, [f" {share:.0%}" for share in self.shares.values()], fontsize=9)
        right.set(title="Shares of the eager step", xlabel="per cent")
        for axes in (left, right):
            axes.invert_yaxis()
            axes.margins(x=0.4)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def milliseconds(seconds: float) -> str:
    """Seconds in words of three digits.

    Example:
        >>> milliseconds(0.0412), milliseconds(5.123e-05)
        ('41.2 ms', '51.2 us')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds >= _MILLI else f"{seconds * 1e6:.3g} us"


_MILLI = 1e-3


def mebibytes(size: int) -> str:
    """Bytes in words.

    Example:
        >>> mebibytes(3 * 1024 * 1024), mebibytes(2048)
        ('3.0 MiB', '2.0 KiB')
    """
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
