"""MS MARCO passage slates of TREC DL19 and DL20: windows of 20 passages ranked by RankVicuna-7B, or BM25's top.

Raw folder: `dl19_teacher_windows.jsonl.gz` and `dl20_teacher_windows.jsonl.gz`, made from the rankings that
github.com/castorini/rank_llm publishes (Apache-2.0) and the NIST judgements, and BM25's 100 passages a query in
`dl19_bm25_top100.jsonl.gz` and `dl20_bm25_top100.jsonl.gz`; the passages are for research use.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np

from spd.datasets.files import read_rows
from spd.datasets.interactions import require_files
from spd.datasets.splits import DataSplits
from spd.errors import DataError
from spd.slate import Slate, slate_from_row

TRAIN_FILE = "dl19_teacher_windows.jsonl.gz"
EVAL_FILE = "dl20_teacher_windows.jsonl.gz"
TRAIN_BM25_FILE = "dl19_bm25_top100.jsonl.gz"
EVAL_BM25_FILE = "dl20_bm25_top100.jsonl.gz"
BM25 = "BM25"
NUM_TOP = 20
SOURCE = "the teacher windows are made from the rankings in github.com/castorini/rank_llm and TREC's DL judgements"

Row = dict[str, object]
Scores = Mapping[tuple[object, object], object]
"""BM25's score of a (query, passage id)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MsMarcoConfig:
    """Which windows become slates; training takes DL19, evaluation DL20, so no query is in both."""

    seed: int = 0
    """Decides the candidates' order (the file's own leaks the teacher's), and which queries and windows train."""
    train_retriever: str | None = None
    """Train on this first stage's windows only, e.g. "BM25"; None keeps all five."""
    num_train_queries: int | None = None
    """Train on so many of the 43 queries; a smaller number's are among a larger one's. None takes all."""
    train_windows_per_query: int | None = None
    """Train on so many windows of each query, nested in the same way; None takes all."""
    eval_source: Literal["windows", "bm25_top20", "bm25_top100"] = "windows"
    """Evaluate on the teacher's windows, or (without a teacher) on the first passages of BM25's ranking."""
    shuffle_eval: bool = True
    """Shuffle evaluation candidates; false keeps BM25's order, from which sliding windows start."""
    eval_retriever: str | None = None
    """Keep only this first stage's windows for evaluation, e.g. "BM25"; None keeps all five."""
    eval_window: int | None = None
    """Keep only this window of each sliding pass, 0 (ranks 81 to 100) to 8 (1 to 20); None keeps all nine."""

    def problems(self) -> list[str]:
        found = [
            f"{name}={value} must be at least 1, or null for all"
            for name in ("num_train_queries", "train_windows_per_query")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        of_windows = self.eval_source == "windows"
        if of_windows and not self.shuffle_eval:
            found.append("shuffle_eval=false with eval_source='windows' shows the teacher's order: use a bm25 source")
        if not of_windows and (self.eval_retriever is not None or self.eval_window is not None):
            found.append(f"eval_retriever and eval_window choose windows, not {self.eval_source!r}: leave them null")
        return found


def load_ms_marco(folder: str | Path, config: MsMarcoConfig) -> DataSplits:
    """Return the slates: grades 0 to 3 (None unjudged) as relevance, the RankVicuna permutation as teacher.

    A window whose teacher output was no permutation has `teacher_ranking` None; `num_without_teacher` counts these.
    BM25's slates have no teacher. `score` is BM25's: of its own slates, and of its windows where the folder holds the
    BM25 files; None for other retrievers' windows.
    """
    root = Path(folder)
    eval_file = EVAL_FILE if config.eval_source == "windows" else EVAL_BM25_FILE
    require_files(root, (TRAIN_FILE, eval_file), SOURCE)
    scores = _bm25_scores(root / TRAIN_BM25_FILE)
    train = [_window_slate(row, scores, config.seed) for row in _training_rows(root / TRAIN_FILE, config)]
    return DataSplits(train=train, eval=_eval_slates(root, config))


def load_bm25(path: str | Path) -> list[Slate]:
    """Return one slate a query: BM25's 100 passages in BM25's own order, grades as relevance, no teacher."""
    file = Path(path)
    require_files(file.parent, (file.name,), SOURCE)
    return [_with_labels(row) for row in _read_windows(file)]


def shuffle_candidates(slate: Slate, seed: int) -> Slate:
    """Return the slate in another candidate order, its relevance, scores and teacher ranking following."""
    rng = np.random.default_rng((seed, crc32(slate.request_id.encode())))
    return slate.reordered(rng.permutation(len(slate.candidates)).tolist())


def _eval_slates(root: Path, config: MsMarcoConfig) -> list[Slate]:
    if config.eval_source == "windows":
        scores = _bm25_scores(root / EVAL_BM25_FILE)
        return [_window_slate(row, scores, config.seed) for row in _eval_rows(root / EVAL_FILE, config)]
    slates = load_bm25(root / EVAL_BM25_FILE)
    if config.eval_source == "bm25_top20":
        slates = [slate.reordered(range(min(NUM_TOP, len(slate.candidates)))) for slate in slates]
    return [shuffle_candidates(slate, config.seed) for slate in slates] if config.shuffle_eval else slates


def _eval_rows(path: Path, config: MsMarcoConfig) -> list[Row]:
    window = config.eval_window
    rows = [
        row
        for row in _read_windows(path)
        if config.eval_retriever in (None, row.get("retriever"))
        and (window is None or str(row["request_id"]).endswith(f"-w{window}"))
    ]
    if not rows:
        raise DataError(
            f"eval_retriever={config.eval_retriever!r} with eval_window={config.eval_window} keeps no window of "
            f"{path.name}: use one of its `retriever` values and a window from 0 to 8"
        )
    return rows


def _training_rows(path: Path, config: MsMarcoConfig) -> list[Row]:
    """Return the rows of the chosen queries, retriever and windows, in the file's order."""
    rows = list(_read_windows(path))
    queries = _chosen(sorted({str(row["query"]) for row in rows}), config.num_train_queries, config.seed, "queries")
    by_query: dict[str, list[str]] = {query: [] for query in queries}
    for row in rows:
        if row["query"] in by_query and config.train_retriever in (None, row.get("retriever")):
            by_query[str(row["query"])].append(str(row["request_id"]))
    if not any(by_query.values()):
        raise DataError(
            f"train_retriever={config.train_retriever!r} keeps no window of {path.name}: use one of its retrievers"
        )
    kept = {
        request_id
        for query, names in by_query.items()
        for request_id in _chosen(names, config.train_windows_per_query, config.seed, f"windows of {query!r}")
    }
    return [row for row in rows if row["request_id"] in kept]


def _chosen(names: list[str], number: int | None, seed: int, what: str) -> list[str]:
    """Return the first `number` in an order by the seed, so that fewer are a subset of more; None returns all."""
    if number is None:
        return names
    if number > len(names):
        raise DataError(f"{number} exceeds the {len(names)} {what}: ask for fewer, or null for all")
    rng = np.random.default_rng((seed, crc32(what.encode())))
    return [names[place] for place in rng.permutation(len(names))[:number]]


def _read_windows(path: Path) -> Iterator[Row]:
    """Yield the file's rows as they are; DataError on a missing field."""
    for row in read_rows(path):
        lacking = {"request_id", "query", "candidates", "judgements"} - row.keys()
        if lacking:
            raise DataError(f"{path}: a row lacks {min(lacking)!r}: {SOURCE}")
        yield row


def _bm25_scores(path: Path) -> Scores:
    """Return BM25's scores; none where the file is not at hand."""
    if not path.is_file():
        return {}
    return {(row["query"], item["id"]): item.get("score") for row in _read_windows(path) for item in _candidates(row)}


def _window_slate(row: Row, scores: Scores, seed: int) -> Slate:
    """Return the row as a slate, its candidates shuffled so that their order tells nothing."""
    if row.get("retriever") == BM25 and scores:
        joined = [{**item, "score": scores.get((row["query"], item.get("id")))} for item in _candidates(row)]
        row = {**row, "candidates": joined}
    return shuffle_candidates(_with_labels(row), seed)


def _with_labels(row: Row) -> Slate:
    """Return the row as a slate in the file's order, with the scores that its candidates hold."""
    items = _candidates(row)
    scores = [item.get("score") for item in items]
    values = {
        "candidates": [{**item, "id": f"none-{p}"} if item.get("id") is None else item for p, item in enumerate(items)],
        "relevance": row["judgements"],
        "teacher_ranking": row.get("teacher_ranking") if row.get("teacher_valid") else None,
        "score": None if all(score is None for score in scores) else scores,
    }
    return slate_from_row({**row, **values})


def _candidates(row: Row) -> list[dict[str, object]]:
    """Return the row's candidates; DataError where they are no list of objects."""
    candidates = row["candidates"]
    if not isinstance(candidates, list) or not all(isinstance(item, dict) for item in candidates):
        raise DataError(f"slate {row['request_id']!r}: candidates must be a list of {{id, text}}")
    return candidates
