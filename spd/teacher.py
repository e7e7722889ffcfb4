"""The collaborative-filtering teacher: item-KNN, a cheap ranker whose whole order means something.

A candidate scores by how often it occurs in one history with the items of the query's history, damped by the
popularity of both (Sarwar et al., 2001; the exponents 1/2 make it the cosine), recent items counting more.
Legend: H recent history items, N candidates, E pairs of items that ever occurred together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import sparse

from spd.errors import DataError

DEFAULT_CANDIDATE_EXPONENT = 0.5
DEFAULT_HISTORY_EXPONENT = 0.5
DEFAULT_DECAY = 0.8
DEFAULT_NUM_RECENT = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemKnn:
    """Fitted co-occurrence counts, read by `score` and `rank`; items are the integers 0..num_items-1.

    popularity: int64 [num_items], how many histories hold the item.
    pair_keys: int64 [E], sorted, `first * num_items + second` of each pair of distinct items seen together.
    pair_counts: int64 [E], how many histories hold both.
    candidate_exponent, history_exponent: powers of popularity that divide a count; 0 damps nothing.
    decay: weight of a history item relative to the one after it.
    num_recent: how many of the last history items count.
    """

    popularity: npt.NDArray[np.int64]
    pair_keys: npt.NDArray[np.int64]
    pair_counts: npt.NDArray[np.int64]
    candidate_exponent: float = DEFAULT_CANDIDATE_EXPONENT
    history_exponent: float = DEFAULT_HISTORY_EXPONENT
    decay: float = DEFAULT_DECAY
    num_recent: int = DEFAULT_NUM_RECENT

    @classmethod
    def fit(
        cls,
        histories: Sequence[Sequence[int]],
        num_items: int,
        *,
        candidate_exponent: float = DEFAULT_CANDIDATE_EXPONENT,
        history_exponent: float = DEFAULT_HISTORY_EXPONENT,
        decay: float = DEFAULT_DECAY,
        num_recent: int = DEFAULT_NUM_RECENT,
    ) -> Self:
        """Return the teacher of these histories; a repeat within one counts once. DataError on an unknown item."""
        incidence = _incidence(histories, num_items)
        pairs = (incidence.T @ incidence).tocoo()
        apart = pairs.row != pairs.col
        keys = pairs.row[apart].astype(np.int64) * num_items + pairs.col[apart]
        order = np.argsort(keys)
        return cls(
            popularity=np.asarray(incidence.sum(axis=0), dtype=np.int64).ravel(),
            pair_keys=keys[order],
            pair_counts=pairs.data[apart][order],
            candidate_exponent=candidate_exponent,
            history_exponent=history_exponent,
            decay=decay,
            num_recent=num_recent,
        )

    def score(
        self, history: Sequence[int], candidates: Sequence[int], *, own_row: Sequence[int] = ()
    ) -> npt.NDArray[np.float64]:
        """Return float64 [N], higher is better; 0 for a candidate never seen with any recent item.

        history: the query's items, oldest first, without the positive.
        own_row: the fitted history that this query was cut from: its counts are taken out again, exactly as if the
        teacher had been fitted without it, so that a held-out positive inside it can't vote for itself.
        """
        recent = np.asarray(history[-self.num_recent :], dtype=np.int64)
        wanted = np.asarray(candidates, dtype=np.int64)
        own = np.asarray(own_row, dtype=np.int64)
        counts = self._counts(recent, wanted)
        if len(own):
            pairs = np.outer(_is_in(recent, own), _is_in(wanted, own))
            counts = counts - (pairs & (recent[:, None] != wanted[None, :]))
        damping = np.outer(
            np.maximum(self._popularity(recent, own), 1) ** self.history_exponent,
            np.maximum(self._popularity(wanted, own), 1) ** self.candidate_exponent,
        )
        weights = self.decay ** np.arange(len(recent) - 1, -1, -1, dtype=np.float64)
        return np.asarray(weights @ (counts / damping), dtype=np.float64)

    def rank(
        self, history: Sequence[int], candidates: Sequence[int], *, own_row: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return all N candidate indices, best first; ties go to the more popular, then to the earlier in the input."""
        scores = self.score(history, candidates, own_row=own_row)
        popularity = self._popularity(np.asarray(candidates, dtype=np.int64), np.asarray(own_row, dtype=np.int64))
        return tuple(np.lexsort((-popularity, -scores)).tolist())

    def counts(self, items: Sequence[int], *, own_row: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """Return int64 [N], how many fitted histories other than the own one hold each item: its popularity."""
        return self._popularity(np.asarray(items, dtype=np.int64), np.asarray(own_row, dtype=np.int64))

    def _counts(self, recent: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return int64 [H, N], how many fitted histories hold both items; 0 for an item with itself."""
        if not len(self.pair_keys):
            return np.zeros((len(recent), len(wanted)), dtype=np.int64)
        keys = recent[:, None] * len(self.popularity) + wanted[None, :]
        places = np.minimum(np.searchsorted(self.pair_keys, keys), len(self.pair_keys) - 1)
        return np.where(self.pair_keys[places] == keys, self.pair_counts[places], 0)

    def _popularity(self, items: npt.NDArray[np.int64], own: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return int64, how many fitted histories other than the own one hold each item."""
        popularity = self.popularity[items]
        return popularity - _is_in(items, own) if len(own) else popularity


def _incidence(histories: Sequence[Sequence[int]], num_items: int) -> sparse.csr_array:
    """Return int64 [histories, num_items], 1 where a history holds an item."""
    rows = [sorted(set(history)) for history in histories]
    items = np.fromiter((item for row in rows for item in row), dtype=np.int64)
    if len(items) and (items.min() < 0 or items.max() >= num_items):
        raise DataError(
            f"histories hold items {items.min()}..{items.max()}, some outside 0..{num_items - 1}: "
            "number the items from 0, or raise num_items"
        )
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return sparse.csr_array((np.ones_like(items), items, starts), shape=(len(rows), num_items))


def _is_in(items: npt.NDArray[np.int64], own: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.isin(items, own, kind="table")
