"""The table and the picture of what the contests found: ``python benches/report.py`` makes them anew."""

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from contest import Entry
from workloads import WORKLOADS

__all__ = ["RESULTS", "lines", "write"]

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OURS = "purestep"
BEGIN, END = "<!-- the table: written by report.py -->", "<!-- end of the table -->"
NOISY = 0.1


def lines(entries):
    """A line for each entry, with our time over its own."""
    ours = next(entry for entry in entries if entry.peer == OURS)
    for entry in entries:
        if entry.trouble:
            yield f"{entry.peer:32} {entry.trouble}"
            continue
        ratio = f"ours / theirs {ours.median / entry.median:.2f}" if not ours.trouble else ""
        yield (
            f"{entry.peer:32} {entry.median * 1e3:8.3f} ms  spread {spread(entry):4.0%}  {ratio}  "
            f"first step {entry.first:.1f} s  memory {entry.peak:.0f} MiB"
        )


def spread(entry):
    """Distance of the quartiles, as a share of the median."""
    low, _, high = statistics.quantiles(entry.rounds, n=4)
    return (high - low) / entry.median


def read():
    """The results by workload, in the order of the workloads."""
    found = {}
    for name in WORKLOADS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
            found[name]["entries"] = [Entry(**entry) for entry in found[name]["entries"]]
    return found


def write():
    """Write the table into the README and draw the picture."""
    results = read()
    readme = HERE / "README.md"
    text = readme.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{after}")
    draw(results, RESULTS / "ratios.png")


def table(results):
    """Median milliseconds of a step, and in brackets our time over theirs."""
    peers = [entry.peer for entry in next(iter(results.values()))["entries"]]
    rows = [f"| workload | {' | '.join(peers)} |", f"|---|{'---|' * len(peers)}"]
    for name, result in results.items():
        ours = next(entry for entry in result["entries"] if entry.peer == OURS)
        rows.append(f"| {name} | {' | '.join(cell(entry, ours) for entry in result['entries'])} |")
    used = next(iter(results.values()))["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in used.items() if name not in ("cpu", "cores"))
    rows += ["", f"Measured on {used['cores']} cores of {used['cpu']}, with {versions}.", "", *starts(results)]
    return "\n".join(rows)


def cell(entry, ours):
    """One entry: its time, whether it is noisy, our time over its own."""
    if entry.trouble:
        return "no"
    time = f"{entry.median * 1e3:.3g}{'~' if spread(entry) > NOISY else ''}"
    return f"**{time}**" if entry is ours else f"{time} ({ours.median / entry.median:.2f})"


def starts(results):
    """Seconds to the first step of each process, imports not counted, with the compile caches as the run left them."""
    peers = [entry.peer for entry in next(iter(results.values()))["entries"]]
    rows = ["Seconds to the first step (imports apart) and MiB of memory above the imports':", ""]
    rows += [f"| workload | {' | '.join(peers)} |", f"|---|{'---|' * len(peers)}"]
    for name, result in results.items():
        cells = ["no" if e.trouble else f"{e.first:.1f} s, {e.peak:.0f}" for e in result["entries"]]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return [*rows, ""]


def draw(results, path):
    """Our time over each peer's, a panel for each workload; left of the line we are faster."""
    figure = Figure(figsize=(13, 2.6 * ((len(results) + 3) // 4)), dpi=150, layout="constrained")
    panels = figure.subplots((len(results) + 3) // 4, min(4, len(results)), squeeze=False, sharey=True)
    for axes in panels.flat[len(results) :]:
        axes.remove()
    for axes, (name, result) in zip(panels.flat, results.items(), strict=False):
        entries = [entry for entry in result["entries"] if not entry.trouble]
        ours = next(entry for entry in entries if entry.peer == OURS)
        others = [entry for entry in entries if entry is not ours]
        ratios = [ours.median / entry.median for entry in others]
        bars = axes.barh(
            [entry.peer for entry in others], ratios, color=["#0072b2" if r <= 1 else "#d55e00" for r in ratios]
        )
        axes.bar_label(bars, [f" {ratio:.2f}" for ratio in ratios], fontsize=8)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set(title=f"{name}: {ours.median * 1e3:.3g} ms", xlim=(0, max(1.25, *(r * 1.25 for r in ratios))))
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].invert_yaxis()
    figure.suptitle("Time of a training step: ours over theirs (below 1 we are faster)")
    figure.savefig(path)


if __name__ == "__main__":
    write()
