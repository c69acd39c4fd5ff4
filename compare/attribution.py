"""Share out drift that many choices make together: squared error = floor + sum of the shares of what is on.

Errors that are rounded independently add in squares, so the squared error of the final output is linear in the
choices, and no share is negative. Fitted over random subsets by a non-negative lasso (cross-validated) that selects,
and non-negative least squares on the selected that sizes: the lasso alone shrinks the shares it keeps (the relaxed
lasso, Meinshausen 2007). Where the model does not hold, the result says so in `warnings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import Lasso, LinearRegression, lasso_path

from align.compare.search_values import Choices
from align.dumpers.errors import UsageError

Array: TypeAlias = npt.NDArray[np.float64]

FOLDS = 5
PENALTIES = 30
MIN_GOODNESS = 0.8
"""Below this out-of-fold R^2 the shares do not predict a subset's error well enough to trade them against time."""
STRONG_PAIR = 4.5
"""A pair's joint effect is called out from so many standard errors on: more than the best of many has by luck."""
PAIRS_AMONG = 12
"""Only pairs among the so many largest shares are looked at: a pair that matters makes large shares."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one choice adds to the squared error, with an interval; `fraction` of the error of all choices on."""

    choice: str
    squared_error: float
    low: float
    high: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """Shares of all choices, the largest first. Errors in squared units of the metric that was fitted.

    floor: the squared error with every choice off. goodness: R^2 on subsets left out of the fit (1 is perfect, 0 no
    better than the mean, may be negative). fitted: R^2 on all subsets. used, skipped: subsets with a finite error,
    and without. warnings: why the shares should not be trusted as they stand; empty where nothing speaks against them.
    """

    shares: tuple[Share, ...]
    floor: float
    goodness: float
    fitted: float
    level: float
    used: int
    skipped: int
    warnings: tuple[str, ...]

    @property
    def is_additive(self) -> bool:
        return not self.warnings


@dataclass(frozen=True, slots=True)
class FitRules:
    """level: coverage of the intervals. draws: bootstrap samples behind them. seed: of folds and bootstrap."""

    level: float = 0.9
    draws: int = 300
    seed: int = 0


PLAIN = FitRules()


def plan_subsets(choices: Sequence[str], count: int, seed: int) -> tuple[Choices, ...]:
    """Draw random subsets in which each choice is on in half (rounded up or down).

    Columns are permuted independently, so that the number of choices that are on varies and the floor can be told
    from the mean share. Twice as many subsets as choices are a good count; sparse guilt needs fewer.
    """
    dice = np.random.default_rng(seed)
    column = np.arange(count) % 2 == 0
    columns = [dice.permutation(column ^ bool(dice.integers(2))) for _ in choices]
    return tuple(
        frozenset(choice for choice, is_on in zip(choices, columns, strict=True) if is_on[row]) for row in range(count)
    )


def fit_shares(
    subsets: Sequence[Choices], squared_errors: Sequence[float], choices: Sequence[str], *, rules: FitRules = PLAIN
) -> Attribution:
    """Fit each choice's share of the squared error. Subsets with a NaN or infinite error are left out and counted.

    Raises UsageError where lengths differ, an error is negative, or fewer than four subsets are left.
    """
    errors = np.asarray(squared_errors, dtype=np.float64)
    _check(subsets, errors, choices)
    finite = np.isfinite(errors)
    design = np.array([[choice in on for choice in choices] for on in subsets], dtype=np.float64)[finite]
    errors = errors[finite]
    scale = float(errors.max()) or 1.0
    errors = errors / scale  # errors span many decades; the solvers' tolerances are absolute
    penalty, goodness = _choose_penalty(design, errors, rules.seed)
    model = _fit(design, errors, penalty)
    low, high = _intervals(design, errors, penalty, rules)
    skipped = int(finite.size - finite.sum())
    return Attribution(
        shares=_name_shares(choices, model[1:] * scale, low * scale, high * scale),
        floor=float(model[0] * scale),
        goodness=goodness,
        fitted=_r_squared(errors, _predict(design, model)),
        level=rules.level,
        used=len(errors),
        skipped=skipped,
        warnings=_find_warnings(choices, design, errors, model, goodness),
    )


def _check(subsets: Sequence[Choices], errors: Array, choices: Sequence[str]) -> None:
    if len(subsets) != len(errors):
        raise UsageError(f"{len(subsets)} subsets but {len(errors)} errors", "give one squared error a subset")
    if not choices or len(set(choices)) < len(choices):
        raise UsageError(f"{len(choices)} choices, some named twice or none at all", "give each choice once")
    if (errors < 0).any():
        raise UsageError(f"a squared error is {np.nanmin(errors):g}", "give squares, which are not negative")
    if np.isfinite(errors).sum() < 4:
        raise UsageError(f"only {np.isfinite(errors).sum()} subsets have a finite error", "run at least four subsets")


def _fit(design: Array, errors: Array, penalty: float) -> Array:
    """Floor and shares [1 + choices]: the lasso selects, non-negative least squares sizes."""
    chosen = np.arange(design.shape[1])
    if penalty > 0:
        chosen = np.flatnonzero(Lasso(alpha=penalty, positive=True, max_iter=5000).fit(design, errors).coef_)
    return _size(design, errors, chosen)


def _size(design: Array, errors: Array, chosen: npt.NDArray[np.intp]) -> Array:
    columns = np.column_stack([np.ones(len(errors)), design[:, chosen]])
    model = np.zeros(1 + design.shape[1])
    solution = LinearRegression(positive=True, fit_intercept=False).fit(columns, errors).coef_
    model[0], model[1 + chosen] = solution[0], solution[1:]
    return model


def _predict(design: Array, model: Array) -> Array:
    predicted: Array = model[0] + design @ model[1:]
    return predicted


def _r_squared(errors: Array, predicted: Array) -> float:
    """1 where all errors are equal and predicted, 0 where they are equal and are not."""
    spread = float(((errors - errors.mean()) ** 2).sum())
    missed = float(((errors - predicted) ** 2).sum())
    tiny = 1e-18 * len(errors)
    return 1.0 - missed / spread if spread > tiny else float(missed <= tiny)


def _choose_penalty(design: Array, errors: Array, seed: int) -> tuple[float, float]:
    """The lasso penalty whose relaxed fit predicts left-out subsets best, and the R^2 it does so with.

    The selected sets are scored after sizing, as they are used. Of penalties within one standard error of the best
    (Breiman's rule) the largest is taken, so that a choice is named only if it helps.
    """
    centred = design - design.mean(axis=0)
    top = float(np.max(centred.T @ (errors - errors.mean()), initial=0.0)) / len(errors)
    penalties = np.geomspace(top, top * 1e-3, PENALTIES) if top > 0 else np.array([1.0])
    folds = np.random.default_rng(seed).permutation(np.arange(len(errors)) % min(FOLDS, len(errors)))
    predicted = np.stack(
        [_predict_left_out(design, errors, folds == fold, penalties) for fold in np.unique(folds)]
    ).sum(0)
    missed = (predicted - errors) ** 2
    best = int(missed.mean(axis=1).argmin())
    excess = missed - missed[best]
    is_close = excess.mean(axis=1) <= excess.std(axis=1) / math.sqrt(len(errors))
    pick = int(np.flatnonzero(is_close)[0])
    return float(penalties[pick]), _r_squared(errors, predicted[pick])


def _predict_left_out(design: Array, errors: Array, left_out: npt.NDArray[np.bool_], penalties: Array) -> Array:
    """Predictions [penalties, subsets], zero outside the fold."""
    inside, seen = design[~left_out], errors[~left_out]
    centred = inside - inside.mean(axis=0)
    _, paths, _ = lasso_path(centred, seen - seen.mean(), alphas=penalties, positive=True, max_iter=5000)
    predicted = np.zeros((len(penalties), len(errors)))
    for row, weights in enumerate(paths.T):
        predicted[row, left_out] = _predict(design[left_out], _size(inside, seen, np.flatnonzero(weights)))
    return predicted


def _intervals(design: Array, errors: Array, penalty: float, rules: FitRules) -> tuple[Array, Array]:
    """Percentiles of a wild bootstrap of the shares, so that noise that grows with the error is served.

    The centre is the fit over all choices where there are subsets enough: bootstrapping the selected fit would give
    every unselected choice an interval of nothing. Residuals are inflated by their leverage (HC3, MacKinnon and
    White 1985), since a fit leaves less than the noise that went in.
    """
    penalty = 0.0 if len(errors) >= 1.5 * (design.shape[1] + 1) else penalty
    centre = _fit(design, errors, penalty)
    fitted = _predict(design, centre)
    residuals = (errors - fitted) / (1.0 - _leverages(design[:, centre[1:] > 0]))
    dice = np.random.default_rng(rules.seed)
    signs = dice.choice([-1.0, 1.0], size=(rules.draws, len(errors)))
    draws = np.stack([_fit(design, fitted + residuals * row, penalty)[1:] for row in signs])
    tail = 50.0 * (1.0 - rules.level)
    low, high = np.percentile(draws, [tail, 100.0 - tail], axis=0)
    return low, high


def _leverages(columns: Array) -> Array:
    """How much each error draws the fit to itself; kept off 1, where it would be fitted exactly."""
    basis, _ = np.linalg.qr(np.column_stack([np.ones(len(columns)), columns]))
    leverages: Array = np.minimum((basis**2).sum(axis=1), 0.9)
    return leverages


def _name_shares(choices: Sequence[str], sizes: Array, low: Array, high: Array) -> tuple[Share, ...]:
    total = float(sizes.sum())
    shares = [
        Share(
            choice, float(size), float(min(small, size)), float(max(large, size)), float(size) / total if total else 0.0
        )
        for choice, size, small, large in zip(choices, sizes, low, high, strict=True)
    ]
    return tuple(sorted(shares, key=lambda share: -share.squared_error))


def _find_warnings(
    choices: Sequence[str], design: Array, errors: Array, model: Array, goodness: float
) -> tuple[str, ...]:
    found = []
    if len(errors) < 2 * np.count_nonzero(model[1:]) + 4:
        found.append(f"{len(errors)} subsets are few for {np.count_nonzero(model[1:])} shares: run more subsets")
    if not model[1:].any():
        found.append("no choice adds to the error beyond the scatter of the subsets")
    elif goodness < MIN_GOODNESS:
        found.append(f"errors do not add in squares: left-out subsets are predicted with R^2 {goodness:.2f} only")
    pair = _strongest_pair(design, errors, model)
    if pair is not None:
        found.append(f"{choices[pair[0]]} and {choices[pair[1]]} do more or less together than the sum of their shares")
    return tuple(found)


def _strongest_pair(design: Array, errors: Array, model: Array) -> tuple[int, int] | None:
    """The pair of choices whose joint effect is left in the residuals, if it is beyond luck.

    Tested by the partial effect of the product column, after the columns of the model, on the residuals.
    """
    top = np.argsort(-model[1:])[:PAIRS_AMONG]
    columns = np.column_stack([np.ones(len(errors)), design[:, top]])
    if len(errors) <= columns.shape[1] + 2:
        return None
    basis, _ = np.linalg.qr(columns)
    rest = errors - basis @ (basis.T @ errors)
    strengths = {
        (int(one), int(other)): _partial_t(basis, rest, design[:, one] * design[:, other])
        for index, one in enumerate(top)
        for other in top[index + 1 :]
    }
    pair = max(strengths, key=lambda key: strengths[key], default=(0, 0))
    return pair if strengths.get(pair, 0.0) > STRONG_PAIR else None


def _partial_t(basis: Array, rest: Array, product: Array) -> float:
    """|t| of one more column in a least-squares fit; 0 where the column or the residual holds nothing."""
    column = product - basis @ (basis.T @ product)
    size = float(column @ column)
    if size < 1e-9 or float(rest @ rest) < 1e-24:
        return 0.0
    effect = float(column @ rest) / size
    left = rest - effect * column
    freedom = len(rest) - basis.shape[1] - 1
    return abs(effect) / math.sqrt(max(float(left @ left), 1e-30) / freedom / size)
