"""Where a step runs: each device places tensors and reduces sums; see ``cpu.py`` for the smallest one."""

from .cpu import Cpu, cpu

__all__ = ["Cpu", "cpu"]
