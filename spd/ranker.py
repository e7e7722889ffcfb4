"""The one inference path, three verbs: `encode` (slate -> prompt, Batch), `score` (-> matrix), `decode` (-> ranking).

>>> ranker = Ranker.from_pretrained("demo/artifact")
>>> ranker.rank("space opera", ["Star Wars", "Fargo", "Alien"], top_n=2)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from spd.artifact import RankerSpec, load_encoder, load_model, load_spec, model_version
from spd.backbone import Precision, default_device
from spd.batch import Batch, collate, plan_batches
from spd.decode import DecoderName, check_finite, decode_scores, expected_gain
from spd.errors import DataError
from spd.model import RankerModel
from spd.prompt import EncodedSlate, Encoder
from spd.slate import Candidate, Ranking, Slate
from spd.windows import WindowConfig, WindowedRanking, rank_in_windows

DEFAULT_BATCH_TOKENS = 4096
DEFAULT_WINDOWS = WindowConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedDocument:
    """One place of a ranking: the document's index in the input, its score in 0..1, its text."""

    index: int
    relevance_score: float
    document: str


class Ranker:
    """A loaded ranker: encoder, model and decoder of one artifact."""

    def __init__(self, spec: RankerSpec, encoder: Encoder, model: RankerModel, version: str) -> None:
        self.spec = spec
        self.encoder = encoder
        self.model = model
        self.version = version

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | None = None,
        precision: Precision | None = None,
        backbone_source: str | None = None,
    ) -> "Ranker":
        """Return the ranker of an artifact folder; raises ArtifactError when anything in it does not match.

        precision ("bf16", "fp32") and backbone_source override what the artifact recorded.
        """
        folder = Path(path)
        spec = load_spec(folder)
        encoder = load_encoder(folder, spec)
        model = load_model(folder, spec, device or default_device(), precision, backbone_source)
        return cls(spec, encoder, model, model_version(folder))

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        windows: WindowConfig = DEFAULT_WINDOWS,
    ) -> list[RankedDocument]:
        """Return the documents best first, the first `top_n` of the full ranking.

        More than `spec.max_candidates` are ranked in windows. Raises DataError for no documents, or top_n below 1.
        """
        if not isinstance(query, str) or isinstance(documents, str):
            raise DataError("query must be one string and documents a list of strings")
        if top_n is not None and top_n < 1:
            raise DataError(f"top_n={top_n} must be at least 1, or None for all")
        candidates = tuple(Candidate(str(index), text) for index, text in enumerate(documents))
        slate = Slate(request_id="rank", query=query, candidates=candidates)
        ranking = self.rank_slates([slate], windows=windows)[0]
        places = zip(ranking.order, ranking.relevance_score, strict=True)
        ranked = [RankedDocument(index=i, relevance_score=score, document=documents[i]) for i, score in places]
        return ranked[:top_n]

    def rank_slates(
        self,
        slates: Sequence[Slate],
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        windows: WindowConfig = DEFAULT_WINDOWS,
    ) -> list[Ranking]:
        """Return one ranking a slate, in the order given; forwards hold at most `batch_tokens` padded tokens.

        Slates above `spec.max_candidates` (or `windows.size`) are ranked in windows.
        """
        return [found.ranking for found in self.rank_in_windows(slates, batch_tokens, windows)]

    def rank_in_windows(
        self,
        slates: Sequence[Slate],
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        windows: WindowConfig = DEFAULT_WINDOWS,
    ) -> list[WindowedRanking]:
        """Return what `rank_slates` does, and each slate's passes; raises ConfigError for windows that do not fit."""

        def rank_windows(parts: Sequence[Slate]) -> list[Ranking]:
            found = {
                i: self.decode(scores, prompt.order) for i, prompt, scores in self.score_slates(parts, batch_tokens)
            }
            return [found[index] for index in range(len(parts))]

        def gain_windows(parts: Sequence[Slate]) -> list[NDArray[np.float64]]:
            found = {i: self._gain(scores, prompt) for i, prompt, scores in self.score_slates(parts, batch_tokens)}
            return [found[index] for index in range(len(parts))]

        return rank_in_windows(slates, windows, self.spec.max_candidates, rank_windows, gain_windows)

    def score_slates(
        self, slates: Sequence[Slate], batch_tokens: int = DEFAULT_BATCH_TOKENS
    ) -> Iterator[tuple[int, EncodedSlate, NDArray[np.float32]]]:
        """Yield (index of the slate, its prompt, its scores float32 [n, n]) as batches finish, longest slates first."""
        encoded = [self.encode_one(slate) for slate in slates]
        for group in plan_batches([len(slate.input_ids) for slate in encoded], batch_tokens):
            for index, scores in zip(group, self.score(collate([encoded[i] for i in group])), strict=True):
                yield index, encoded[index], scores

    def encode(self, slates: Sequence[Slate]) -> Batch:
        """Return the slates as one right-padded batch; raises DataError for a slate that cannot be ranked."""
        return collate([self.encode_one(slate) for slate in slates])

    def encode_one(self, slate: Slate) -> EncodedSlate:
        """Return one slate's prompt; raises DataError if it is larger than one pass can rank."""
        return encode_within(self.encoder, slate, self.spec.max_candidates)

    def score(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Return each slate's score matrix, float32 [n, n]: candidate (at its place in the prompt) x rank position."""
        return score_batch(self.model, batch)

    def decode(
        self, scores: NDArray[np.float32], order: NDArray[np.int32] | None = None, decoder: DecoderName | None = None
    ) -> Ranking:
        """Return the ranking of one matrix [n, n], by the artifact's decoder unless another is named.

        order: EncodedSlate.order, the candidate at each place of the prompt; None where that is the input order.
        Raises DataError if the matrix is not finite.
        """
        places = np.arange(len(scores), dtype=np.int32) if order is None else order
        return decode_for(self.spec, scores, places, decoder)

    def _gain(self, scores: NDArray[np.float32], prompt: EncodedSlate) -> NDArray[np.float64]:
        """Return float64 [n], the expected gain of each candidate of the slate; refuses what `decode` refuses."""
        check_finite(scores)
        gain = np.empty(len(scores))
        gain[prompt.order] = expected_gain(scores, self.spec.tau, self.spec.sinkhorn_iterations)
        return gain


def encode_within(encoder: Encoder, slate: Slate, max_candidates: int) -> EncodedSlate:
    """Return one slate's prompt; raises DataError for more than `max_candidates`."""
    if len(slate.candidates) > max_candidates:
        raise DataError(
            f"slate {slate.request_id!r}: {len(slate.candidates)} candidates exceed {max_candidates}, the largest "
            "slate this ranker can rank in one pass: send fewer, or train with a larger head.num_positions"
        )
    return encoder.encode(slate)


def score_batch(model: RankerModel, batch: Batch) -> list[NDArray[np.float32]]:
    """Return each slate's score matrix, float32 [n, n], on the CPU; one forward pass."""
    with torch.inference_mode():
        on_device = batch.to(model.device)
        scores = model(on_device).float().cpu().numpy()
    return [matrix[:size, :size] for matrix, size in zip(scores, batch.num_candidates, strict=True)]


def decode_for(
    spec: RankerSpec,
    scores: NDArray[np.float32],
    order: NDArray[np.int32],
    decoder: DecoderName | None = None,
) -> Ranking:
    """Return the ranking of one matrix [n, n] by the spec's decoder and Sinkhorn settings, in the slate's own indices.

    order: EncodedSlate.order. Ties go to the earlier place of the prompt.
    """
    ranking = decode_scores(scores, decoder or spec.decoder, spec.tau, spec.sinkhorn_iterations)
    return replace(ranking, order=tuple(int(order[place]) for place in ranking.order))
