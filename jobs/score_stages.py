"""The stages of offline scoring, as Ray Data actors: Arrow tables of slates in, Arrow tables of rankings out.

Between the stages a row carries its prompt (then `scores`, row-major [n, n]) instead of its text.
A row with an `error` goes through untouched.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from spd.artifact import load_encoder, load_model, load_spec, model_version
from spd.backbone import Precision, default_device
from spd.batch import collate, plan_batches
from spd.errors import DataError
from spd.prompt import EncodedSlate
from spd.ranker import decode_for, encode_within, score_batch
from spd.slate import slate_from_row

ENCODED_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("candidate_ids", pa.list_(pa.string())),
        ("input_ids", pa.list_(pa.int32())),
        ("readout", pa.list_(pa.int32())),
        ("order", pa.list_(pa.int32())),
        ("features", pa.list_(pa.float32())),
        ("prefix_tokens", pa.int32()),
        ("num_truncated", pa.int32()),
        ("error", pa.string()),
    ]
)

RANKED_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("ranking", pa.list_(pa.int32())),
        ("candidate_ids", pa.list_(pa.string())),
        ("relevance_score", pa.list_(pa.float32())),
        ("num_truncated", pa.int32()),
        ("model_version", pa.string()),
        ("error", pa.string()),
    ]
)

Row = dict[str, object]


class EncodeSlates:
    """Rows of `SLATE_SCHEMA` -> rows of `ENCODED_SCHEMA`."""

    def __init__(self, artifact: str) -> None:
        folder = Path(artifact)
        self._spec = load_spec(folder)
        self._encoder = load_encoder(folder, self._spec)

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = [self._encode(table.slice(index, 1)) for index in range(table.num_rows)]
        return pa.Table.from_pylist(rows, schema=ENCODED_SCHEMA)

    def _encode(self, table: pa.Table) -> Row:
        try:
            row = table.to_pylist()[0]
        except ValueError as error:  # text that is no UTF-8 can be stored in Parquet all the same
            return {"error": f"{type(error).__name__}: the row cannot be read: {error}"}
        return self._encode_row(row)

    def _encode_row(self, row: Mapping[str, object]) -> Row:
        try:
            slate = slate_from_row(row)
            encoded = encode_within(self._encoder, slate, self._spec.max_candidates)
        except DataError as error:
            request_id = row["request_id"]
            return {
                "request_id": None if request_id is None else str(request_id),
                "error": f"{type(error).__name__}: {error}",
            }
        return {
            "request_id": slate.request_id,
            "candidate_ids": [candidate.id for candidate in slate.candidates],
            **encoded.to_row(),
        }


class PrefillSlates:
    """Adds `scores` to each encoded row: forwards over microbatches of similar length under a token budget."""

    def __init__(
        self, artifact: str, batch_tokens: int, precision: Precision | None, backbone: str | None, num_threads: int
    ) -> None:
        torch.set_num_threads(num_threads)
        folder = Path(artifact)
        self._batch_tokens = batch_tokens
        self._model = load_model(folder, load_spec(folder), default_device(), precision, backbone)

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        slates = {index: EncodedSlate.from_row(row) for index, row in enumerate(rows) if row["error"] is None}
        scores: list[np.ndarray | None] = [None] * len(rows)
        indices = list(slates)
        for group in plan_batches([len(slates[i].input_ids) for i in indices], self._batch_tokens):
            members = [indices[place] for place in group]
            for index, matrix in zip(
                members, score_batch(self._model, collate([slates[i] for i in members])), strict=True
            ):
                scores[index] = matrix.ravel()
        column = pa.array(scores, pa.list_(pa.float32()))
        return table.drop_columns(["input_ids", "readout", "features"]).append_column("scores", column)


class DecodeSlates:
    """Rows with `scores` -> rows of `RANKED_SCHEMA`."""

    def __init__(self, artifact: str) -> None:
        folder = Path(artifact)
        self._spec = load_spec(folder)
        self._version = model_version(folder)

    def __call__(self, table: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._decode(row) for row in table.to_pylist()], schema=RANKED_SCHEMA)

    def _decode(self, row: Row) -> Row:
        kept = {key: row[key] for key in ("request_id", "num_truncated", "error")} | {"model_version": self._version}
        if row["error"] is not None:
            return kept
        ids, scores = row["candidate_ids"], row["scores"]
        assert isinstance(ids, list) and isinstance(scores, list)
        try:
            matrix = np.array(scores, dtype=np.float32).reshape(len(ids), len(ids))
            ranking = decode_for(self._spec, matrix, np.array(row["order"], dtype=np.int32))
        except DataError as error:
            return kept | {"error": f"{type(error).__name__}: {error}"}
        return kept | {
            "ranking": ranking.order,
            "candidate_ids": [ids[index] for index in ranking.order],
            "relevance_score": ranking.relevance_score,
        }
