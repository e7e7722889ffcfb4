"""What every data set loader returns: slates to train on and slates to evaluate on."""

from dataclasses import dataclass
from itertools import chain

from spd.slate import Slate


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplits:
    """Two disjoint lists of slates; no user or query occurs in both."""

    train: list[Slate]
    eval: list[Slate]

    @property
    def num_without_teacher(self) -> int:
        """Return how many slates of both lists have no teacher ranking, for example because it was invalid."""
        return sum(slate.teacher_ranking is None for slate in chain(self.train, self.eval))
