"""Training targets: what a slate says of the true order, as a matrix over rank positions or as an answer's tokens.

B slates, N candidates. `target_BNN` is float32, candidate x rank position: P_teacher of the Sinkhorn loss. A candidate
that nothing places has a row of zeros.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spd.slate import Slate

TargetName = Literal["teacher", "labels", "labels_then_teacher"]
AnswerTail = Literal["unscored", "shuffled", "sought"]


def has_target(slate: Slate, kind: TargetName) -> bool:
    """Return whether the slate says anything of that kind: a teacher's ranking, or a positive label."""
    return bool(label_tiers(slate)) if kind == "labels" else bool(slate.teacher_ranking)


def target_matrix(slates: Sequence[Slate], size: int, kind: TargetName = "teacher", top_m: int | None = None) -> Tensor:
    """Return float32 [B, N, N], N = `size`: the share of teachers (or of tie-breaks) that place i at k.

    teacher: the mean of the permutation matrices of all the slate's teacher rankings (a soft target, if several).
    labels: the positives first, by grade; candidates of one grade share its places evenly.
    labels_then_teacher: the positives first, by grade, then the teacher's order of the rest.
    top_m: keep the first m places only (a teacher's prefix): further down its order is noise.
    """
    target = np.zeros((len(slates), size, size), dtype=np.float32)
    for row, slate in enumerate(slates):
        target[row] = _label_target(slate, size) if kind == "labels" else _teacher_target(_led(slate, kind), size)
    if top_m is not None:
        target[:, :, top_m:] = 0.0
    return torch.from_numpy(target)


def label_tiers(slate: Slate) -> list[list[int]]:
    """Return the positive candidates by falling grade; those of one grade together, in input order."""
    grades = slate.relevance or ()
    positive = [index for index, grade in enumerate(grades) if grade is not None and grade > 0]

    def grade_of(index: int) -> float:
        grade = grades[index]
        assert grade is not None
        return -grade

    return [list(tier) for _, tier in groupby(sorted(positive, key=grade_of), key=grade_of)]


def answer_target(
    slate: Slate, kind: TargetName, tail: AnswerTail, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return (emitted, wanted): the candidates that an answer names, and at each step the one it should have named.

    teacher: its ranking, twice (after the positives, for labels_then_teacher).
    labels: the positives by grade (ties at random), then by `tail`
    unscored: nothing more.
    shuffled: the rest at random, scored like the positives.
    sought: all candidates at random are emitted, and at each step the best positive not yet named is wanted: so that
    an answer which began wrongly goes on looking.
    """
    if kind != "labels":
        ranking = list(_led(slate, kind).teacher_ranking or ())
        return ranking, ranking
    positives = [index for tier in label_tiers(slate) for index in rng.permutation(tier).tolist()]
    everyone = rng.permutation(len(slate.candidates)).tolist()
    if tail == "sought":
        wanted: list[int] = []
        for step in range(len(everyone)):
            named = set(everyone[:step])
            left = [index for index in positives if index not in named]
            if not left:
                break
            wanted.append(left[0])
        return everyone[: len(wanted)], wanted
    rest = [] if tail == "unscored" else [index for index in everyone if index not in set(positives)]
    return positives + rest, positives + rest


def _led(slate: Slate, kind: TargetName) -> Slate:
    """Return the slate, for labels_then_teacher with its positives moved to the front of every teacher ranking."""
    if kind == "teacher":
        return slate
    positives = [index for tier in label_tiers(slate) for index in tier]

    def lead(ranking: tuple[int, ...]) -> tuple[int, ...]:
        return (*positives, *(index for index in ranking if index not in positives))

    return replace(
        slate,
        teacher_ranking=lead(slate.teacher_ranking or ()),
        extra_teacher_rankings=tuple(map(lead, slate.extra_teacher_rankings)),
    )


def _teacher_target(slate: Slate, size: int) -> NDArray[np.float32]:
    rankings = [slate.teacher_ranking or (), *slate.extra_teacher_rankings]
    target = np.zeros((size, size), dtype=np.float32)
    for ranking in rankings:
        target[list(ranking), range(len(ranking))] += 1.0 / len(rankings)
    return target


def _label_target(slate: Slate, size: int) -> NDArray[np.float32]:
    target = np.zeros((size, size), dtype=np.float32)
    first = 0
    for tier in label_tiers(slate):
        target[np.ix_(tier, range(first, first + len(tier)))] = 1.0 / len(tier)
        first += len(tier)
    return target
