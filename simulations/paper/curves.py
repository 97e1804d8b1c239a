"""Piecewise polynomials of the prompt length: prefill seconds and KV bytes between measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from simulations.workload.trace import Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """`pieces[i]` holds between `knots[i-1]` and `knots[i]`; the outer pieces go on without end."""

    knots: tuple[float, ...]
    """Inner borders of the pieces, ascending, in tokens; one fewer than pieces."""
    pieces: tuple[tuple[float, ...], ...]
    """Coefficients by ascending power of the length in tokens."""

    def __call__(self, tokens: float | Floats) -> Floats:
        """Values at `tokens`, in its shape."""
        at = np.asarray(tokens, dtype=float)
        piece = np.searchsorted(self.knots, at, side="left")
        values = np.zeros(at.shape)
        for index, coefficients in enumerate(self.pieces):
            values = np.where(piece == index, np.polynomial.polynomial.polyval(at, coefficients), values)
        return values

    def scaled(self, factor: float, offset: float = 0.0) -> Curve:
        """The curve factor · this + offset."""
        pieces = tuple((factor * first + offset, *(factor * c for c in rest)) for first, *rest in self.pieces)
        return Curve(self.knots, pieces)

    def inverse(self, value: float) -> float:
        """The length at which a curve of rising, joined lines has `value`."""
        for right, (start, slope) in zip((*self.knots, inf), self.pieces, strict=True):
            tokens = (value - start) / slope
            if tokens <= right:
                return tokens
        raise AssertionError("the last piece has no end")


def least_squares(tokens: Sequence[float], values: Sequence[float], degree: int) -> Curve:
    """One polynomial as near as can be to the points."""
    coefficients = np.polynomial.Polynomial.fit(tokens, values, degree).convert().coef
    return Curve((), (tuple(float(c) for c in coefficients),))


def joined_by_lines(tokens: Sequence[float], values: Sequence[float]) -> Curve:
    """Lines from point to point, the first and the last one extended."""
    pieces = []
    points = list(zip(tokens, values, strict=True))
    for (left, low), (right, high) in pairwise(points):
        slope = (high - low) / (right - left)
        pieces.append((low - slope * left, slope))
    return Curve(tuple(float(knot) for knot in tokens[1:-1]), tuple(pieces))
