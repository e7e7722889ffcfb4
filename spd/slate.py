"""The slate: a query with its candidates, the one data contract of every job and of the endpoint.

On disk a slate is one Parquet row of `SLATE_SCHEMA`; in memory it is a `Slate`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from spd.errors import DataError

CANDIDATE_TYPE = pa.struct([("id", pa.string()), ("text", pa.string())])

SLATE_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("query", pa.string()),
        ("candidates", pa.list_(CANDIDATE_TYPE)),
        ("relevance", pa.list_(pa.float32())),
        ("teacher_ranking", pa.list_(pa.int32())),
        ("score", pa.list_(pa.float32())),
        ("extra_teacher_rankings", pa.list_(pa.list_(pa.int32()))),
    ]
)

FLOAT32_MAX = 3.4028234663852886e38

REQUIRED_COLUMNS = ("request_id", "query", "candidates")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to rank: the caller's id and the text that the backbone reads."""

    id: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Slate:
    """A query and its N candidates in upstream order, with what is known of their true order.

    relevance: N observed labels or grades, None where unjudged.
    teacher_ranking: indices into `candidates`, best first; may be a prefix (top m).
    score: N scores of the stage before (BM25, a retriever, ...), None where it gave none.
    extra_teacher_rankings: further permutations by the teacher, for example under shuffled input.
    """

    request_id: str
    query: str
    candidates: tuple[Candidate, ...]
    relevance: tuple[float | None, ...] | None = None
    teacher_ranking: tuple[int, ...] | None = None
    score: tuple[float | None, ...] | None = None
    extra_teacher_rankings: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.request_id:
            raise DataError("request_id='' is empty: give every slate a unique id")
        where = f"slate {self.request_id!r}"
        if not self.candidates:
            raise DataError(f"{where}: candidates=[] has no candidate: drop the slate or give it at least one")
        _check_values(where, "relevance", self.relevance, len(self.candidates))
        _check_values(where, "score", self.score, len(self.candidates))
        _check_ranking(where, "teacher_ranking", self.teacher_ranking, len(self.candidates))
        for ranking in self.extra_teacher_rankings:
            _check_ranking(where, "extra_teacher_rankings", ranking, len(self.candidates))
        if self.extra_teacher_rankings and self.teacher_ranking is None:
            raise DataError(f"{where}: extra_teacher_rankings without a teacher_ranking: put the first one there")

    def reordered(self, order: Sequence[int]) -> "Slate":
        """Return the slate with candidate `order[p]` at place p; labels, scores and rankings follow.

        An order of some candidates only leaves the others out, of the rankings too.
        """
        place = {old: new for new, old in enumerate(order)}

        def follow(ranking: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(place[old] for old in ranking if old in place)

        return replace(
            self,
            candidates=tuple(self.candidates[old] for old in order),
            relevance=None if self.relevance is None else tuple(self.relevance[old] for old in order),
            score=None if self.score is None else tuple(self.score[old] for old in order),
            teacher_ranking=None if self.teacher_ranking is None else follow(self.teacher_ranking),
            extra_teacher_rankings=tuple(map(follow, self.extra_teacher_rankings)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The order of one slate.

    order: all N candidate indices, best first: always a permutation.
    relevance_score: N floats in 0..1, aligned with `order`, non-increasing.
    is_degenerate: the score matrix gave every candidate the same row, so `order` is the input order.
    """

    order: tuple[int, ...]
    relevance_score: tuple[float, ...]
    is_degenerate: bool = False


def slate_from_row(row: Mapping[str, object]) -> Slate:
    """Return the slate of one table row (or JSON object); raises DataError naming the field that is wrong."""
    missing = [name for name in REQUIRED_COLUMNS if name not in row]
    if missing:
        raise DataError(f"column {missing[0]!r} is missing: a slate needs {', '.join(REQUIRED_COLUMNS)}")
    request_id = _text(row["request_id"], "request_id", "a row")
    where = f"slate {request_id!r}"
    candidates = row["candidates"]
    if not isinstance(candidates, Sequence) or isinstance(candidates, str | bytes):
        raise DataError(f"{where}: candidates={_short(candidates)} must be a list of {{id, text}}")
    return Slate(
        request_id=request_id,
        query=_text(row["query"], "query", where),
        candidates=tuple(_candidate(item, i, where) for i, item in enumerate(candidates)),
        relevance=_numbers(row.get("relevance"), "relevance", where),
        teacher_ranking=_indices(row.get("teacher_ranking"), "teacher_ranking", where),
        score=_numbers(row.get("score"), "score", where),
        extra_teacher_rankings=_index_lists(row.get("extra_teacher_rankings"), where),
    )


def slate_to_row(slate: Slate) -> dict[str, object]:
    """Return the slate as one row of `SLATE_SCHEMA`."""
    return {
        "request_id": slate.request_id,
        "query": slate.query,
        "candidates": [{"id": c.id, "text": c.text} for c in slate.candidates],
        "relevance": None if slate.relevance is None else list(slate.relevance),
        "teacher_ranking": None if slate.teacher_ranking is None else list(slate.teacher_ranking),
        "score": None if slate.score is None else list(slate.score),
        "extra_teacher_rankings": [list(ranking) for ranking in slate.extra_teacher_rankings] or None,
    }


def slates_to_table(slates: Iterable[Slate]) -> pa.Table:
    """Return the slates as one table of `SLATE_SCHEMA`."""
    return pa.Table.from_pylist([slate_to_row(slate) for slate in slates], schema=SLATE_SCHEMA)


def check_unique(request_ids: Iterable[str]) -> None:
    """Raise DataError if an id occurs twice: resuming and joining would then lose rows."""
    twice = [name for name, count in Counter(request_ids).items() if count > 1]
    if twice:
        raise DataError(
            f"request_id={twice[0]!r} occurs more than once ({len(twice)} such ids): ids must be unique across "
            "the data set; make them so, for example by a suffix"
        )


def _check_values(where: str, field: str, values: tuple[float | None, ...] | None, size: int) -> None:
    if values is None:
        return
    if len(values) != size:
        raise DataError(
            f"{where}: {field} has {len(values)} values for {size} candidates: give one each, null where unknown"
        )
    if not all(value is None or abs(value) <= FLOAT32_MAX for value in values):
        raise DataError(f"{where}: {field}={_short(values)} holds no float32 number: use null where unknown")


def _check_ranking(where: str, field: str, ranking: tuple[int, ...] | None, size: int) -> None:
    if ranking is None:
        return
    if len(set(ranking)) != len(ranking) or not all(0 <= index < size for index in ranking):
        raise DataError(
            f"{where}: {field}={_short(ranking)} is no permutation (or prefix of one) of the indices "
            f"0..{size - 1}: repair it, or set it to null"
        )


def _candidate(item: object, index: int, where: str) -> Candidate:
    field = f"candidates[{index}]"
    if not isinstance(item, Mapping) or not {"id", "text"} <= item.keys():
        raise DataError(f"{where}: {field}={_short(item)} must be an object with id and text")
    return Candidate(_text(item["id"], f"{field}.id", where), _text(item["text"], f"{field}.text", where))


def _text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {field}={_short(value)} must be a string")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(f"{where}: {field} holds half a character (a lone surrogate): replace or drop it")
    return value


def _numbers(values: object, field: str, where: str) -> tuple[float | None, ...] | None:
    if values is None:
        return None
    if not isinstance(values, Sequence) or not all(v is None or isinstance(v, int | float) for v in values):
        raise DataError(f"{where}: {field}={_short(values)} must be a list of numbers or nulls")
    try:
        return tuple(None if value is None else float(value) for value in values)
    except OverflowError:
        raise DataError(f"{where}: {field}={_short(values)} holds a number too large for float32") from None


def _index_lists(values: object, where: str) -> tuple[tuple[int, ...], ...]:
    field = "extra_teacher_rankings"
    if values is None:
        return ()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise DataError(f"{where}: {field}={_short(values)} must be a list of rankings")
    return tuple(ranking for value in values if (ranking := _indices(value, field, where)) is not None)


def _indices(values: object, field: str, where: str) -> tuple[int, ...] | None:
    if values is None or (isinstance(values, Sequence) and not values):
        return None
    if not isinstance(values, Sequence) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise DataError(f"{where}: {field}={_short(values)} must be a list of candidate indices, best first")
    return tuple(values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
