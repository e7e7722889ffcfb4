"""How much a ranking depends on the order in which the candidates come: each slate ranked again under random orders."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from spd.metrics import BootstrapBy, clusters_of, estimate, kendall_tau
from spd.slate import Slate


def order_sensitivity(
    rank: Callable[[Sequence[Slate]], Sequence[Sequence[int]]],
    slates: Sequence[Slate],
    num_shuffles: int,
    seed: int,
    bootstrap_by: BootstrapBy = "slate",
) -> dict[str, object]:
    """Return how alike the rankings of a slate are under `num_shuffles` random candidate orders, as JSON values.

    kendall_tau: mean over the pairs of shuffles, then over slates, with its interval; 1 says that order is ignored.
    exposure: by input position, the mean 1/log2(1 + rank) of the candidate that stood there; 1 is uniform.
    """
    rankings: list[list[list[int]]] = []
    gains: list[list[NDArray[np.float64]]] = []
    for number in range(num_shuffles):
        shuffles = [_shuffle(slate, seed, number) for slate in slates]
        orders = rank([slate.reordered(shuffle) for slate, shuffle in zip(slates, shuffles, strict=True)])
        gains.append([exposure_of(order) for order in orders])
        pairs = zip(orders, shuffles, strict=True)
        rankings.append([[shuffle[place] for place in order] for order, shuffle in pairs])
    taus = [mean_tau(shuffled) for shuffled in zip(*rankings, strict=True)]
    tau = estimate(taus, seed=seed, clusters=clusters_of(slates, bootstrap_by))
    exposure = _mean_by_place([gain for of_shuffle in gains for gain in of_shuffle])
    return {"num_shuffles": num_shuffles, "kendall_tau": tau.to_json(), "exposure": exposure}


def exposure_of(order: Sequence[int]) -> NDArray[np.float64]:
    """Return float64 [n]: 1/log2(1 + rank) of the candidate at each input position, divided by its mean over ranks."""
    gain = 1.0 / np.log2(np.arange(2, len(order) + 2))
    by_place = np.empty(len(order))
    by_place[np.asarray(order)] = gain / gain.mean()
    return by_place


def mean_tau(rankings: Sequence[Sequence[int]]) -> float | None:
    """Return the mean Kendall tau over the pairs of one slate's rankings; None for slates of one candidate."""
    taus = [kendall_tau(first, second) for first, second in combinations(rankings, 2)]
    defined = [tau for tau in taus if tau is not None]
    return fmean(defined) if defined else None


def sensitivity_line(found: Mapping[str, object]) -> str:
    """Return what the job prints of `order_sensitivity`'s answer."""
    tau, exposure = found["kendall_tau"], found["exposure"]
    assert isinstance(tau, Mapping) and isinstance(exposure, list)
    value = "-" if tau["value"] is None else f"{tau['value']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}]"
    return (
        f"evaluate: under {found['num_shuffles']} shuffles of each slate Kendall tau is {value} between rankings; "
        f"exposure (1 = uniform) {exposure[0]:.2f} at the first input position, {exposure[len(exposure) // 2]:.2f} in "
        f"the middle, {exposure[-1]:.2f} at the last, {min(exposure):.2f} to {max(exposure):.2f} over all"
    )


def _shuffle(slate: Slate, seed: int, number: int) -> list[int]:
    rng = np.random.default_rng((seed, number, crc32(slate.request_id.encode())))
    order: list[int] = rng.permutation(len(slate.candidates)).tolist()
    return order


def _mean_by_place(rows: Sequence[NDArray[np.float64]]) -> list[float]:
    """Return the mean at each place over the rows that reach it."""
    longest = max(map(len, rows))
    return [float(np.mean([row[place] for row in rows if place < len(row)])) for place in range(longest)]
