"""What a listwise answer said: the candidates it named, checked, counted and repaired into a permutation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ORDINAL = re.compile(r"\[(\d{1,9})\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A permutation, and what had to be mended to make it one.

    order: all candidate indices, best first. num_repeated: places that named a candidate named before.
    num_missing: candidates never named. num_out_of_range: names that are no candidate's.
    """

    order: tuple[int, ...]
    num_repeated: int = 0
    num_missing: int = 0
    num_out_of_range: int = 0

    @property
    def is_valid(self) -> bool:
        """Whether the answer was a permutation as it stood."""
        return not (self.num_repeated or self.num_missing or self.num_out_of_range)


def repair(named: Sequence[int], size: int) -> Answer:
    """Return the answer that named these indices: the first naming counts, missing ones follow in input order.

    The usual rule (RankGPT, arXiv 2304.09542).
    """
    in_range = [index for index in named if 0 <= index < size]
    first = dict.fromkeys(in_range)
    missing = [index for index in range(size) if index not in first]
    return Answer(
        order=(*first, *missing),
        num_repeated=len(in_range) - len(first),
        num_missing=len(missing),
        num_out_of_range=len(named) - len(in_range),
    )


def parse_ordinals(text: str, size: int) -> Answer:
    """Return the answer of a text such as `[3] > [1] > [2]`, ordinals from 1, whatever stands between."""
    return repair([int(match) - 1 for match in ORDINAL.findall(text)], size)
