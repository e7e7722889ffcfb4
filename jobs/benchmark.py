"""Time single pass decoding against autoregressive decoding: same backbone, same slates, all in turn in one run.

    python -m jobs.benchmark --set slates='["runs/movielens/eval", "runs/beauty/eval"]'
    python -m jobs.benchmark --set slates='["runs/beauty/eval"]' --set backbone.num_layers=15 --set json=bench.json

Every contender ranks one slate at a time (latency). The backbone's weights are as they came and the head's are random:
neither changes what a pass costs. Medians over slates and repeats; `ratios` divides medians of the same run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from jobs.cli import run_job
from jobs.files import check_writable, write_json
from jobs.hardware import commit, hardware
from jobs.progress import progress
from spd.artifact import RankerSpec, build_untrained_model
from spd.autoregressive import ArRanker, ArRanking, Decoding, build_ar_model
from spd.backbone import (
    BackboneConfig,
    backbone_sha256,
    cast_parameters,
    default_device,
    load_backbone,
    load_tokenizer,
    resolve_backbone,
    resolve_dtype,
)
from spd.config import config_to_dict
from spd.datasets.files import read_slates
from spd.errors import DataError
from spd.prompt import Encoder, Identifiers, PromptConfig
from spd.ranker import Ranker
from spd.slate import Slate

WARM_UP_SLATES = 1
AR_CONTENDERS: dict[str, tuple[Identifiers, Decoding]] = {
    "ar": ("ordinals", "constrained"),
    "ar_token": ("markers", "constrained"),
    "ar_free": ("ordinals", "free"),
}
Seconds = dict[str, float]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkConfig:
    """What is timed on what."""

    slates: tuple[str, ...]
    """Slates, a folder or URI for each size N: the first `num_slates` of each that have its first slate's N."""
    num_slates: int = 5
    """Slates of each size."""
    repeats: int = 3
    """Rounds over all contenders and slates."""
    json: str | None = None
    """File for the results; null only prints them."""
    num_threads: int | None = None
    """Torch's CPU threads; null takes all cores."""
    seed: int = 0
    """Decides the head's random weights."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)

    def problems(self) -> list[str]:
        names = ("num_slates", "repeats")
        found = [f"{name}={getattr(self, name)} must be at least 1" for name in names if getattr(self, name) < 1]
        if not self.slates:
            found.append("slates=[] names no data: give one folder a size")
        return found


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", BenchmarkConfig, run, describe)


def run(config: BenchmarkConfig) -> dict[str, object]:
    """Time all contenders; prints the table, returns (and stores) the results."""
    if config.json:
        check_writable(config.json)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    sets = [_read(uri, config.num_slates) for uri in config.slates]
    largest = max(len(slates[0].candidates) for slates in sets)
    ranker = _build_ranker(config, largest)
    contenders = {name: _build_ar(config, ranker.spec, names) for name, (names, _) in AR_CONTENDERS.items()}
    sizes: dict[str, object] = {}
    ratios: dict[str, float] = {}
    for slates in sets:
        size = len(slates[0].candidates)
        timings, rankings = _time_all(ranker, contenders, slates, config.repeats)
        medians = {name: median(values) for name, values in timings.items()}
        sizes[f"n{size}"] = {
            "num_tokens": median(len(ranker.encode_one(slate).input_ids) for slate in slates),
            "milliseconds": {name: round(1e3 * value, 3) for name, value in medians.items()},
            "spread_milliseconds": {name: [round(1e3 * v, 3) for v in (min(x), max(x))] for name, x in timings.items()},
            "passes": {"spd": 1, **{name: median(r.num_passes for r in found) for name, found in rankings.items()}},
            "valid_share": {name: mean(r.answer.is_valid for r in found) for name, found in rankings.items()},
        }
        ratios |= {f"{name}_over_spd_n{size}": round(medians[name] / medians["spd"], 2) for name in contenders}
        ratios[f"e2e_over_prefill_n{size}"] = round(medians["spd"] / medians["spd: prefill"], 4)
    report: dict[str, object] = {
        "commit": commit(),
        "hardware": hardware(),
        "config": config_to_dict(config),
        "sizes": sizes,
        "ratios": ratios,
    }
    print_table(sizes, ratios)
    if config.json:
        write_json(config.json, report)
    return report


def print_table(sizes: Mapping[str, object], ratios: Mapping[str, float]) -> None:
    """Print milliseconds and passes of each contender and part, a column a size, then the ratios."""
    table = Table(title="median milliseconds a slate (passes, valid permutations)")
    table.add_column("", no_wrap=True)
    for name in sizes:
        table.add_column(name, justify="right")
    first = next(iter(sizes.values()))
    assert isinstance(first, dict)
    for part in first["milliseconds"]:
        cells = []
        for values in sizes.values():
            assert isinstance(values, dict)
            cells.append(milliseconds_cell(values, part))
        table.add_row(part, *cells)
    console = Console()
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name} = {ratio}")


def milliseconds_cell(values: Mapping[str, Mapping[str, float]], part: str) -> str:
    """Return a part's milliseconds at one size; with them a contender's passes, and its share of valid answers."""
    told = []
    if part in values["passes"]:
        told.append(f"{values['passes'][part]:g}")
    if part in values["valid_share"]:
        told.append(f"{values['valid_share'][part]:.0%}")
    return f"{values['milliseconds'][part]:.3f}" + (f" ({', '.join(told)})" if told else "")


def describe(config: BenchmarkConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: settings, and the slates found."""
    found = {uri: len(_read(uri, config.num_slates)) for uri in config.slates}
    return {"config": config_to_dict(config), "slates": found, "hardware": hardware()}


def _read(uri: str, count: int) -> list[Slate]:
    found: list[Slate] = []
    for slate in read_slates(uri):
        if len(found) < count and (not found or len(slate.candidates) == len(found[0].candidates)):
            found.append(slate)
    if not found:
        raise DataError(f"slates={uri!r} holds no slate: name a folder with at least one")
    return found


def _build_ranker(config: BenchmarkConfig, num_positions: int) -> Ranker:
    folder = resolve_backbone(config.backbone.source)
    spec = RankerSpec(
        backbone=config.backbone,
        backbone_sha256=backbone_sha256(folder),
        prompt=config.prompt,
        num_positions=num_positions,
        max_trained_candidates=num_positions,
        has_adapter=False,
    )
    encoder = Encoder(load_tokenizer(folder), config.prompt)
    return Ranker(spec, encoder, build_untrained_model(spec, default_device(), config.seed), "untrained")


def _build_ar(config: BenchmarkConfig, spec: RankerSpec, identifiers: Identifiers) -> ArRanker:
    folder = resolve_backbone(config.backbone.source)
    prompt = replace(config.prompt, identifiers=identifiers, readout="end", attention="causal", use_score=False)
    backbone = load_backbone(folder, config.backbone.num_layers, torch.float32)
    device = default_device()
    model = build_ar_model(backbone, folder)
    cast_parameters(model, resolve_dtype(config.backbone.precision, device))
    encoder = Encoder(load_tokenizer(folder), prompt)
    return ArRanker(replace(spec, objective="ar", prompt=prompt), encoder, model.to(device).eval(), "untrained")


def _time_all(
    ranker: Ranker, contenders: Mapping[str, ArRanker], slates: Sequence[Slate], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[ArRanking]]]:
    """Return the seconds of each contender and part, and each one's answers, over all slates and repeats."""
    timings: dict[str, list[float]] = {}
    rankings: dict[str, list[ArRanking]] = {name: [] for name in contenders}
    rounds = [*slates[:WARM_UP_SLATES], *(slate for _ in range(repeats) for slate in slates)]
    size = len(slates[0].candidates)
    for place, slate in enumerate(progress(rounds, len(rounds), f"benchmark: N={size}")):
        found = _time_spd(ranker, slate)
        for name, contender in contenders.items():
            found[name], (ranking,) = _timed(partial(contender.rank_slates, [slate], AR_CONTENDERS[name][1]))
            rankings[name].append(ranking)
        if place >= WARM_UP_SLATES:
            for name, seconds in found.items():
                timings.setdefault(name, []).append(seconds)
    return timings, rankings


def _time_spd(ranker: Ranker, slate: Slate) -> Seconds:
    """Return the seconds of a whole ranking, of each of its parts, and of the backbone's forward alone."""
    model = ranker.model
    ranker.rank_slates([slate])  # untimed: the contender before pushed this one's memory out of the caches
    whole, _ = _timed(lambda: ranker.rank_slates([slate]))
    encode, encoded = _timed(lambda: ranker.encode([slate]))
    batch = encoded.to(model.device)
    with torch.inference_mode():
        prefill, hidden = _timed(lambda: model.read(batch))
        head, scores = _timed(lambda: model(batch, hidden))
    matrix = np.ascontiguousarray(scores[0].float().cpu().numpy()[: len(slate.candidates), : len(slate.candidates)])
    decode, _ = _timed(lambda: ranker.decode(matrix))
    parts = {"spd: encode": encode, "spd: prefill": prefill, "spd: head": head, "spd: decode": decode}
    return {"spd": whole, **parts}


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return (seconds, result), waiting for the GPU where there is one."""
    start_s = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s, result


if __name__ == "__main__":
    raise SystemExit(main())
