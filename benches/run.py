"""Run the contests and write what came out: ``python benches/run.py [workload ...]``."""

import sys

from contest import Peer, contest
from workloads import WORKLOADS

PEERS = (
    Peer("purestep", "peers.in_purestep:step_of"),
    Peer("eager", "peers.hand_written:eager"),
    Peer("eager, fused AdamW", "peers.hand_written:fused"),
    Peer("compiled model, fused AdamW", "peers.hand_written:compiled"),
    Peer("compiled model, compiled optimizer", "peers.hand_written:compiled_whole"),
    Peer("Lightning", "peers.in_lightning:step_of"),
    Peer("Accelerate", "peers.in_accelerate:step_of"),
    Peer("TorchOpt", "peers.in_torchopt:step_of"),
    Peer("JAX + optax", "peers.in_jax:step_of", "peers.in_jax:prepare"),
)

if __name__ == "__main__":
    for name in sys.argv[1:] or WORKLOADS:
        print(name)
        entries = contest(WORKLOADS[name], PEERS)
        mine = entries[0]
        for e in entries:
            if e.trouble:
                print("  %-36s %s" % (e.peer, e.trouble))
                continue
            print(
                "  %-36s %8.3f ms (%.3f-%.3f)  ratio %.2f  first %.1f s  peak %.0f MiB"
                % (
                    e.peer,
                    e.median * 1e3,
                    min(e.rounds) * 1e3,
                    max(e.rounds) * 1e3,
                    mine.median / e.median,
                    e.first,
                    e.peak,
                ),
                flush=True,
            )
