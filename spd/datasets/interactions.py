"""Slates from what users bought or liked: one held-out positive among sampled negatives.

Shared by `movielens` and `amazon_beauty`. Items are the integers 0..num_items-1 of a catalog.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from spd.errors import ConfigError, DataError
from spd.slate import Candidate, Slate
from spd.teacher import ItemKnn

Negatives = Literal["uniform", "popular"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NegativeSampler:
    """Draws items that a user has no history with, without repeats.

    cumulative: float64 [num_items], cumulative probability of each item, ending at 1.
    drawable: the items of probability above 0.
    """

    cumulative: npt.NDArray[np.float64]
    drawable: frozenset[int]

    @classmethod
    def build(cls, negatives: Negatives, popularity: npt.NDArray[np.int64]) -> Self:
        """Return a sampler that draws all items alike ("uniform") or in proportion to popularity ("popular")."""
        weights = np.ones(len(popularity)) if negatives == "uniform" else popularity.astype(np.float64)
        if not weights.sum() > 0:
            raise DataError("negatives='popular' finds no item with any interaction: use 'uniform', or more users")
        cumulative = np.cumsum(weights)
        return cls(cumulative=cumulative / cumulative[-1], drawable=frozenset(np.flatnonzero(weights).tolist()))

    def sample(self, rng: np.random.Generator, seen: Collection[int], count: int) -> list[int]:
        """Return `count` distinct items outside `seen`, in drawn order; DataError if there are not so many."""
        excluded = frozenset(seen)
        num_left = len(self.drawable) - len(self.drawable & excluded)
        if num_left < count:
            raise DataError(
                f"num_candidates={count + 1} needs {count} negatives, but only {num_left} items are outside a user's "
                f"history: lower num_candidates to {num_left + 1} or less"
            )
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            places = np.searchsorted(self.cumulative, rng.random(2 * count), side="right")
            drawn.update((item, None) for item in places.tolist() if item not in excluded)
        return list(drawn)[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlateBuilder:
    """Builds the slates of one data set.

    num_candidates: N, one positive and N-1 negatives.
    query_prefix: what precedes the names of the history in the query text.
    """

    catalog: Sequence[Candidate]
    teacher: ItemKnn
    sampler: NegativeSampler
    num_candidates: int
    query_prefix: str

    def build(
        self,
        *,
        request_id: str,
        history: Sequence[int],
        positive: int,
        seen: Collection[int],
        own_row: Sequence[int],
        rng: np.random.Generator,
    ) -> Slate:
        """Return the slate of `positive` (relevance 1) among negatives (0) in shuffled order, ranked by the teacher.

        Its upstream score is the popularity: how many fitted histories hold the candidate.

        history: items before the positive that make the query and the teacher's input, oldest first.
        seen: every item the user ever touched; none becomes a negative.
        own_row: the user's row of the teacher's fit, left out of it here; empty if the fit never held the positive.
        """
        negatives = self.sampler.sample(rng, seen, self.num_candidates - 1)
        items = [int(item) for item in rng.permutation([positive, *negatives])]
        return Slate(
            request_id=request_id,
            query=self.query_prefix + "; ".join(self.catalog[item].text for item in history),
            candidates=tuple(self.catalog[item] for item in items),
            relevance=tuple(1.0 if item == positive else 0.0 for item in items),
            teacher_ranking=self.teacher.rank(history, items, own_row=own_row),
            score=tuple(float(count) for count in self.teacher.counts(items, own_row=own_row)),
        )


def distinct_names(names: Sequence[str], marks: Sequence[str]) -> list[str]:
    """Return the names, each that occurs more than once followed by its mark in brackets."""
    counts = Counter(names)
    return [f"{name} ({mark})" if counts[name] > 1 else name for name, mark in zip(names, marks, strict=True)]


def check_config(negatives: str, counts: Mapping[str, int]) -> None:
    """Raise one ConfigError naming every count below its least value, and an unknown kind of negatives."""
    least = {name: 2 if name == "num_candidates" else 1 for name in counts}
    problems = [f"{name}={n} must be at least {least[name]}" for name, n in counts.items() if n < least[name]]
    if negatives not in get_args(Negatives):
        problems.append(f"negatives={negatives!r} must be one of {', '.join(get_args(Negatives))}")
    if problems:
        raise ConfigError("; ".join(problems) + ": change the data set's configuration")


def require_files(folder: Path, names: Sequence[str], source: str) -> None:
    """Raise DataError if the folder lacks any of these files, saying where the data set comes from."""
    missing = [str(folder / name) for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{', '.join(missing)} not found: {source}")
