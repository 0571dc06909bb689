"""Numbers and what may be said of them: medians over repetitions, their spread, ratios, and budgets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One quantity of one side, as measured in each repetition."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def text(self, digits: int = 0) -> str:
        """Write the median, and between which values the repetitions lay."""
        median = f"{self.median:,.{digits}f}"
        if len(self.values) == 1:
            return median
        return f"{median} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "values": list(self.values)}


@dataclass(frozen=True)
class Ratio:
    """One side's figure over another's. Its spread is that of the pairs: repetitions are compared with their own."""

    value: float
    pairs: Figure

    @staticmethod
    def of(over: Figure, under: Figure) -> Ratio:
        pairs = tuple(a / b for a, b in zip(over.values, under.values, strict=True))
        return Ratio(over.median / under.median, Figure(pairs))

    def text(self) -> str:
        if len(self.pairs.values) == 1:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x ({self.pairs.low:.2f} to {self.pairs.high:.2f})"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.pairs.low, "high": self.pairs.high, "values": list(self.pairs.values)}


@dataclass(frozen=True)
class Budget:
    """A bound that a ratio (or a quantity) has to reach, and an aim that it should reach."""

    bound: float
    aim: float
    unit: str = "x"
    #: A budget for a cost is an upper bound.
    is_cost: bool = False

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.is_cost else value >= self.bound

    def reaches_aim(self, value: float) -> bool:
        return value <= self.aim if self.is_cost else value >= self.aim

    def text(self, value: float) -> str:
        sign = "at most" if self.is_cost else "at least"
        verdict = "missed" if not self.holds(value) else "aim reached" if self.reaches_aim(value) else "held"
        return f"{sign} {self.bound:g}{self.unit}, aim {self.aim:g}{self.unit}: {verdict}"

    def to_json(self, value: float) -> dict[str, Any]:
        return {
            "bound": self.bound,
            "aim": self.aim,
            "unit": self.unit,
            "is_cost": self.is_cost,
            "held": self.holds(value),
            "aim_reached": self.reaches_aim(value),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least this percentage of the values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]
