"""Merging moments: count, mean and sums of powers of deviations, by the parallel formulas of Chan and of Pébay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Structs of n, avg, m2 and, as far as the struct has them, m3 and m4."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        order = old.type.num_fields - 1
        n1, mean1, *a = _columns(old)
        n2, mean2, *b = _columns(new)
        n = n1 + n2
        with np.errstate(all="ignore"):
            # What has seen nothing must not weigh in, not even as NaN.
            delta = mean2 - mean1
            step = np.where(n == 0, 0.0, delta / np.where(n == 0, 1.0, n))
            merged = [n, mean1 + step * n2, a[0] + b[0] + delta * step * n1 * n2]
            if order >= 3:
                merged.append(
                    a[1] + b[1] + step * step * delta * n1 * n2 * (n1 - n2) + 3.0 * step * (n1 * b[0] - n2 * a[0])
                )
            if order >= 4:
                merged.append(
                    a[2] + b[2] + step**3 * delta * n1 * n2 * (n1 * n1 - n1 * n2 + n2 * n2)
                    + 6.0 * step * step * (n1 * n1 * b[0] + n2 * n2 * a[0])
                    + 4.0 * step * (n1 * b[1] - n2 * a[1])
                )  # fmt: skip
        return _struct(merged, n1, n2, old, new)


@dataclass(frozen=True)
class Comoments:
    """Structs of n, xAvg, yAvg, ck (the sum of products of deviations), xMk and yMk (of their squares)."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        n1, x1, y1, c1, xx1, yy1 = _columns(old)
        n2, x2, y2, c2, xx2, yy2 = _columns(new)
        n = n1 + n2
        with np.errstate(all="ignore"):
            dx, dy = x2 - x1, y2 - y1
            some = np.where(n == 0, 1.0, n)
            sx, sy = dx / some, dy / some
            merged = [
                n,
                x1 + sx * n2,
                y1 + sy * n2,
                c1 + c2 + dx * sy * n1 * n2,
                xx1 + xx2 + dx * sx * n1 * n2,
                yy1 + yy2 + dy * sy * n1 * n2,
            ]
        return _struct(merged, n1, n2, old, new)


def _columns(moments: pa.Array) -> list[Doubles]:
    return [child.fill_null(0.0).to_numpy(zero_copy_only=False) for child in moments.flatten()]


def _struct(merged: list[Doubles], n1: Doubles, n2: Doubles, old: pa.Array, new: pa.Array) -> pa.Array:
    """The merged columns; the other side as it is where one has seen nothing."""
    chosen = [
        np.where(n2 == 0, before, np.where(n1 == 0, after, both))
        for both, before, after in zip(merged, _columns(old), _columns(new), strict=True)
    ]
    return pa.StructArray.from_arrays([pa.array(column) for column in chosen], fields=list(old.type))
