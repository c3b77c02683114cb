"""Run the contests and write what came out: ``python benches/run.py [workload ...]``; all of them by default.

Figures go to ``benches/results/``, one file for each workload; the table in ``benches/README.md`` and the picture are made
of whatever lies there.
"""

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import attrs

import report
from contest import Peer, contest
from workloads import WORKLOADS

PEERS = (
    Peer("purestep", "peers.in_purestep:step_of", scan_home="peers.in_purestep:scanned"),
    Peer("eager", "peers.hand_written:eager"),
    Peer("eager, fused AdamW", "peers.hand_written:fused"),
    Peer("compiled model, fused AdamW", "peers.hand_written:compiled"),
    Peer("compiled model, compiled AdamW", "peers.hand_written:compiled_whole"),
    Peer("Lightning", "peers.in_lightning:step_of"),
    Peer("Accelerate", "peers.in_accelerate:step_of"),
    Peer("TorchOpt", "peers.in_torchopt:step_of"),
    Peer(
        "JAX + optax",
        "peers.in_jax:step_of",
        "peers.in_jax:prepare",
        "peers.in_jax:scanned",
        "peers.in_jax:prepare_stacked",
    ),
)


def main():
    """Run, write, and print a line for each entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help="all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a turn")
    options = parser.parse_args()
    for name in options.workloads or WORKLOADS:
        workload = WORKLOADS[name]
        print(f"{name}: {workload.about}", flush=True)
        entries = contest(workload, PEERS, rounds=options.rounds, block=options.seconds)
        for line in report.lines(entries):
            print(f"  {line}", flush=True)
        found = {
            "workload": name,
            "about": workload.about,
            "machine": machine(),
            "entries": [*map(attrs.asdict, entries)],
        }
        report.RESULTS.mkdir(exist_ok=True)
        (report.RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    report.write()


def machine():
    """What the figures were measured on and with."""
    names = ("torch", "lightning", "accelerate", "torchopt", "jax", "optax")
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in about if "model name" in line), "unknown")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


if __name__ == "__main__":
    main()
