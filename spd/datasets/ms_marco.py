"""MS MARCO passage slates: windows of 20 passages of TREC DL19 and DL20, ranked by RankVicuna-7B.

Raw folder: `dl19_teacher_windows.jsonl.gz` and `dl20_teacher_windows.jsonl.gz`, made from the rankings that
github.com/castorini/rank_llm publishes (Apache-2.0) and the NIST judgements; the passages are for research use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from spd.datasets.files import read_rows
from spd.datasets.interactions import require_files
from spd.datasets.splits import DataSplits
from spd.errors import DataError
from spd.slate import Slate, slate_from_row

TRAIN_FILE = "dl19_teacher_windows.jsonl.gz"
EVAL_FILE = "dl20_teacher_windows.jsonl.gz"
SOURCE = "the teacher windows are made from the rankings in github.com/castorini/rank_llm and TREC's DL judgements"


@dataclass(frozen=True, kw_only=True, slots=True)
class MsMarcoConfig:
    """Which windows become slates; training takes DL19, evaluation DL20, so no query is in both."""

    seed: int = 0
    """Decides the candidates' order; the file's own order leaks the teacher's."""
    eval_retriever: str | None = None
    """Keep only this first stage's windows for evaluation, e.g. "BM25"; None keeps all five."""
    eval_window: int | None = None
    """Keep only this window of each sliding pass, 0 (ranks 81 to 100) to 8 (1 to 20); None keeps all nine."""


def load_ms_marco(folder: str | Path, config: MsMarcoConfig) -> DataSplits:
    """Return one slate a window: grades 0 to 3 (None unjudged) as relevance, the RankVicuna permutation as teacher.

    A window whose teacher output was no permutation has `teacher_ranking` None; `num_without_teacher` counts these.
    """
    root = Path(folder)
    require_files(root, (TRAIN_FILE, EVAL_FILE), SOURCE)
    kept = [row for row in _read_windows(root / EVAL_FILE) if _is_kept(row, config)]
    if not kept:
        raise DataError(
            f"eval_retriever={config.eval_retriever!r} with eval_window={config.eval_window} keeps no window of "
            f"{EVAL_FILE}: use one of its `retriever` values and a window from 0 to 8"
        )
    return DataSplits(
        train=[_window_slate(row, config.seed) for row in _read_windows(root / TRAIN_FILE)],
        eval=[_window_slate(row, config.seed) for row in kept],
    )


def load_bm25(path: str | Path) -> list[Slate]:
    """Return one slate a query: BM25's 100 passages in BM25's own order, grades as relevance, no teacher."""
    file = Path(path)
    require_files(file.parent, (file.name,), SOURCE)
    return [_with_labels(row) for row in _read_windows(file)]


def _read_windows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the file's rows as they are; DataError on a missing field."""
    for row in read_rows(path):
        lacking = {"request_id", "query", "candidates", "judgements"} - row.keys()
        if lacking:
            raise DataError(f"{path}: a row lacks {min(lacking)!r}: {SOURCE}")
        yield row


def _is_kept(row: dict[str, object], config: MsMarcoConfig) -> bool:
    retriever_fits = config.eval_retriever in (None, row.get("retriever"))
    return retriever_fits and (config.eval_window is None or str(row["request_id"]).endswith(f"-w{config.eval_window}"))


def _with_labels(row: dict[str, object]) -> Slate:
    """Return the row as a slate in the file's order."""
    candidates = row["candidates"]
    if isinstance(candidates, list):
        candidates = [_named(item, index) for index, item in enumerate(candidates)]
    ranking = row.get("teacher_ranking") if row.get("teacher_valid") else None
    return slate_from_row({**row, "candidates": candidates, "relevance": row["judgements"], "teacher_ranking": ranking})


def _named(item: object, index: int) -> object:
    """Return the candidate with an id, made from its place in the file where it has none."""
    return {**item, "id": f"none-{index}"} if isinstance(item, dict) and item.get("id") is None else item


def _window_slate(row: dict[str, object], seed: int) -> Slate:
    """Return the row as a slate, its candidates shuffled so that their order tells nothing."""
    return shuffle_candidates(_with_labels(row), seed)


def shuffle_candidates(slate: Slate, seed: int) -> Slate:
    """Return the slate in another candidate order, its relevance and teacher ranking following."""
    rng = np.random.default_rng((seed, crc32(slate.request_id.encode())))
    return slate.reordered(rng.permutation(len(slate.candidates)).tolist())
