"""Targets: the teacher's places, grades that share theirs, and what an answer should have named at each step."""

from dataclasses import replace

import numpy as np
import pytest

from spd.targets import answer_target, has_target, label_tiers, target_matrix
from tests.conftest import make_slate


def test_a_teachers_places_by_hand() -> None:
    full = replace(make_slate(3), teacher_ranking=(2, 0, 1))
    prefix = replace(make_slate(2), teacher_ranking=(1,))

    target = target_matrix([full, prefix], 3)

    assert target[0].tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert target[1].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert target_matrix([full], 3, top_m=1)[0].tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_several_teachers_are_averaged() -> None:
    slate = replace(make_slate(2), teacher_ranking=(0, 1), extra_teacher_rankings=((0, 1), (1, 0), (0, 1)))

    assert target_matrix([slate], 2)[0].tolist() == [[0.75, 0.25], [0.25, 0.75]]


def test_candidates_of_one_grade_share_its_places() -> None:
    slate = replace(make_slate(5), relevance=(1.0, 3.0, None, 1.0, 0.0))

    assert label_tiers(slate) == [[1], [0, 3]]
    target = target_matrix([slate], 5, "labels")[0]
    assert target[1].tolist() == [1, 0, 0, 0, 0]
    assert target[0].tolist() == target[3].tolist() == [0, 0.5, 0.5, 0, 0]
    assert target[2].sum() == target[4].sum() == 0


def test_positives_lead_the_teachers_order() -> None:
    slate = replace(make_slate(4), relevance=(0.0, 0.0, 1.0, 2.0), teacher_ranking=(1, 2, 0, 3))

    target = target_matrix([slate], 4, "labels_then_teacher")[0]

    assert target.argmax(1).tolist() == [3, 2, 1, 0]
    assert answer_target(slate, "labels_then_teacher", "sought", np.random.default_rng(0))[0] == [3, 2, 1, 0]


def test_what_an_answer_should_have_named() -> None:
    slate = replace(make_slate(6), relevance=(0.0, 1.0, 0.0, 2.0, 0.0, 0.0))
    rng = np.random.default_rng(0)

    assert answer_target(slate, "labels", "unscored", rng) == ([3, 1], [3, 1])
    emitted, wanted = answer_target(slate, "labels", "shuffled", rng)
    assert emitted == wanted and emitted[:2] == [3, 1] and sorted(emitted) == list(range(6))
    emitted, wanted = answer_target(slate, "labels", "sought", rng)
    for step, index in enumerate(wanted):
        assert index == (3 if 3 not in emitted[:step] else 1)
    assert len(emitted) == len(wanted) and not {1, 3} <= set(emitted[:-1])


def test_the_teachers_answer_is_its_ranking() -> None:
    slate = replace(make_slate(3), teacher_ranking=(2, 0, 1))

    assert answer_target(slate, "teacher", "sought", np.random.default_rng(0)) == ([2, 0, 1], [2, 0, 1])


@pytest.mark.parametrize(
    ("changes", "teacher", "labels"),
    [({}, False, False), ({"teacher_ranking": (1,)}, True, False), ({"relevance": (0.0, 1.0, None)}, False, True)],
)
def test_what_a_slate_can_teach(changes: dict[str, object], teacher: bool, labels: bool) -> None:
    slate = replace(make_slate(3), **changes)

    assert has_target(slate, "teacher") is teacher
    assert has_target(slate, "labels") is labels
