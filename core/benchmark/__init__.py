"""How fast a step is: measured against what a user would write instead, with where the time and the memory go."""

from .benchmark import benchmark
from .report import Row, StepReport

__all__ = ["Row", "StepReport", "benchmark"]
