"""Offline scoring on real Ray Data: every row comes out, bad rows with their error, and all paths rank alike."""

import itertools
import json
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import score
from jobs.score import ScoreConfig
from spd.config import load_config
from spd.errors import DataError
from spd.ranker import Ranker
from spd.slate import SLATE_SCHEMA, slate_from_row, slate_to_row
from tests.conftest import make_slate

pytestmark = pytest.mark.ray

NUM_GOOD = 150


def rows() -> list[dict[str, object]]:
    good = [slate_to_row(make_slate(1 + i % 30, f"r{i}", query=f"query {i}")) for i in range(NUM_GOOD)]
    bad = [
        {**good[0], "request_id": "empty", "candidates": []},
        {**good[0], "request_id": "no-query", "query": None},
        {**slate_to_row(make_slate(33)), "request_id": "too-large"},
        {**good[3], "request_id": "bad-teacher", "teacher_ranking": [0, 0]},
    ]
    return [*good[:70], *bad, *good[70:]]


def unreadable_row() -> pa.Table:
    """Return one row whose query is no UTF-8, which Parquet stores all the same."""
    table = pa.Table.from_pylist([rows()[0] | {"request_id": "not-utf8"}], schema=SLATE_SCHEMA)
    query = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe")]
    )
    return table.set_column(1, "query", query)


@pytest.fixture(scope="module")
def scored(ray_session: Path, tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folder of the rankings, and of the job's work."""
    work = tmp_path_factory.mktemp("score")
    (work / "in").mkdir()
    for part, start in enumerate(range(0, NUM_GOOD + 4, 40)):
        table = pa.Table.from_pylist(rows()[start : start + 40], schema=SLATE_SCHEMA)
        pq.write_table(table, work / "in" / f"part-{part}.parquet")
    pq.write_table(unreadable_row(), work / "in" / "part-9.parquet")
    score.run(config(work, tiny_artifact))
    return work / "out", work


def config(work: Path, artifact: Path, *extra: str) -> ScoreConfig:
    settings = [
        f"input={work / 'in'}",
        f"output={work / 'out'}",
        f"artifact={artifact}",
        f"tracking.uri=sqlite:///{work / 'mlflow.db'}",
        "batch_tokens=2000",
        "block_slates=32",
        *extra,
    ]
    return load_config(ScoreConfig, None, settings)


def read(folder: Path) -> dict[str, dict[str, object]]:
    table = pq.read_table(folder)
    assert table.num_rows == NUM_GOOD + 5
    return {str(row["request_id"]): row for row in table.to_pylist()}


def test_no_row_is_lost_and_every_ranking_is_a_permutation(scored: tuple[Path, Path]) -> None:
    out = read(scored[0])

    assert set(out) == {str(row["request_id"]) for row in rows()} | {"None"}
    assert "the row cannot be read" in str(out["None"]["error"])
    for row in rows():
        ranked = out[str(row["request_id"])]
        if ranked["error"] is None:
            candidates = row["candidates"]
            assert isinstance(candidates, list)
            ranking, scores = ranked["ranking"], ranked["relevance_score"]
            assert sorted(ranking) == list(range(len(candidates)))
            assert ranked["candidate_ids"] == [candidates[index]["id"] for index in ranking]
            assert all(a >= b for a, b in itertools.pairwise(scores))


@pytest.mark.parametrize(
    ("request_id", "message"),
    [
        ("empty", "candidates=[] has no candidate"),
        ("no-query", "query=None must be a string"),
        ("too-large", "33 candidates exceed 32"),
        ("bad-teacher", "teacher_ranking=(0, 0) is no permutation"),
    ],
)
def test_a_bad_row_goes_out_with_its_error(scored: tuple[Path, Path], request_id: str, message: str) -> None:
    row = read(scored[0])[request_id]

    assert message in row["error"]
    assert row["ranking"] is None and row["relevance_score"] is None


def test_the_summary_counts_what_is_there(scored: tuple[Path, Path]) -> None:
    summary = json.loads((scored[0] / "_summary.json").read_text())

    assert summary["num_scored"] == summary["num_valid_permutations"] == NUM_GOOD
    assert summary["num_errors"] == 5
    assert summary["errors_by_kind"] == {"DataError": 4, "UnicodeDecodeError": 1}


def test_the_job_ranks_as_the_ranker_does(scored: tuple[Path, Path], tiny_ranker: Ranker) -> None:
    out = read(scored[0])
    slates = [slate_from_row(row) for row in rows() if out[str(row["request_id"])]["error"] is None]

    for slate, ranking in zip(slates, tiny_ranker.rank_slates(slates), strict=True):
        row = out[slate.request_id]
        assert row["ranking"] == list(ranking.order)
        assert row["relevance_score"] == pytest.approx(ranking.relevance_score, abs=1e-5)
        assert row["model_version"] == tiny_ranker.version


def test_too_many_errors_fail_the_job_but_keep_its_output(scored: tuple[Path, Path], tiny_artifact: Path) -> None:
    strict = config(scored[1], tiny_artifact, "overwrite=true", "max_error_rate=0.01")

    with pytest.raises(DataError, match=r"5 of 155 rows have an error, above max_error_rate=0.01"):
        score.run(strict)
    assert len(read(scored[0])) == NUM_GOOD + 5
