"""The slate contract: what a row must hold, and what the message says where it doesn't."""

import pytest

from spd.errors import DataError
from spd.slate import SLATE_SCHEMA, Candidate, Slate, check_unique, slate_from_row, slate_to_row, slates_to_table

ROW: dict[str, object] = {
    "request_id": "a",
    "query": "q",
    "candidates": [{"id": "x", "text": "first"}, {"id": "y", "text": "second"}],
    "relevance": [1, None],
    "teacher_ranking": [1],
}


def test_a_row_becomes_a_slate():
    assert slate_from_row(ROW) == Slate(
        request_id="a",
        query="q",
        candidates=(Candidate("x", "first"), Candidate("y", "second")),
        relevance=(1.0, None),
        teacher_ranking=(1,),
    )


def test_labels_and_teacher_may_be_absent():
    slate = slate_from_row({name: ROW[name] for name in ("request_id", "query", "candidates")})

    assert slate.relevance is None
    assert slate.teacher_ranking is None


def test_a_slate_survives_its_row_and_its_table():
    slate = slate_from_row(ROW)
    table = slates_to_table([slate])

    assert slate_from_row(slate_to_row(slate)) == slate
    assert table.schema == SLATE_SCHEMA
    assert slate_from_row(table.to_pylist()[0]) == slate


@pytest.mark.parametrize("name", ["request_id", "query", "candidates"])
def test_a_missing_column_is_named(name: str):
    row = {key: value for key, value in ROW.items() if key != name}

    with pytest.raises(DataError, match=f"column '{name}' is missing"):
        slate_from_row(row)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("request_id", "", "request_id='' is empty"),
        ("request_id", None, "request_id=None must be a string"),
        ("query", 3, "query=3 must be a string"),
        ("candidates", [], "has no candidate"),
        ("candidates", "xy", "must be a list"),
        ("candidates", None, "must be a list"),
        ("candidates", ["x"], r"candidates\[0\]='x' must be an object"),
        ("candidates", [{"id": "x"}], r"candidates\[0\]=.* with id and text"),
        ("candidates", [{"id": "x", "text": None}], r"candidates\[0\]\.text=None must be a string"),
        ("relevance", [1.0], "relevance has 1 values for 2 candidates"),
        ("relevance", [1.0, float("nan")], "holds no float32 number"),
        ("relevance", [1.0, 1e39], "holds no float32 number"),
        ("relevance", [1.0, 10**400], "too large for float32"),
        ("query", "half \ud800", "lone surrogate"),
        ("relevance", ["1", "0"], "must be a list of numbers"),
        ("teacher_ranking", [0, 0], "no permutation"),
        ("teacher_ranking", [2], r"indices 0\.\.1"),
        ("teacher_ranking", [-1], "no permutation"),
        ("teacher_ranking", [0.5], "must be a list of candidate indices"),
        ("teacher_ranking", [True], "must be a list of candidate indices"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, message: str):
    with pytest.raises(DataError, match=message):
        slate_from_row({**ROW, field: value})


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(DataError) as error:
        slate_from_row({**ROW, "query": list(range(1000))})

    assert len(str(error.value)) < 200


def test_doubled_ids_are_fatal():
    check_unique(["a", "b"])

    with pytest.raises(DataError, match="request_id='a' occurs more than once"):
        check_unique(["a", "b", "a"])
