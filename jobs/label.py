"""Have a teacher order slates: adds `teacher_ranking`, which training distils.

    python -m jobs.label --set input=slates --set output=labelled --set local.artifact=runs/teacher
    python -m jobs.label --set input=slates --set output=labelled --set backend=openai --set chat.model=NAME \
        --set endpoint.base_url=http://localhost:8000/v1 --set endpoint.requests_per_minute=600
    python -m jobs.label --set input=slates --set output=labelled --set backend=import --set rankings=run.trec

Every answer goes to OUTPUT.journal before anything else happens to it: the same command, started again after a crash,
asks only what has no answer yet. Slates without an answer (their number and reasons are in OUTPUT.summary.json) go out
with teacher_ranking null; to try those again, start the same command with overwrite=true. Remove the journal yourself
when you want other answers.
"""

import hashlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import ray
import ray.data
from ray.data import ActorPoolStrategy

from jobs.cli import run_job
from jobs.cluster import check_workers, start_ray
from jobs.files import check_writable, is_local, open_slates, read_request_ids, sole_owner, write_json
from jobs.label_config import LabelConfig
from jobs.label_import import match_ranking, read_rankings
from jobs.label_journal import Label, open_journal, read_journal
from jobs.label_summary import Counts, labelled, summarise
from jobs.label_teachers import ChatTeacher, JournalTexts, LocalTeacher, Task, chat_messages
from jobs.progress import progress
from jobs.tracking import Tracker, absolute, fetch_artifact
from spd.artifact import load_spec, model_version
from spd.config import config_to_dict, flatten
from spd.datasets.files import check_target, read_slates, resolve_uri, write_slates
from spd.errors import ConfigError
from spd.slate import SLATE_SCHEMA, check_unique, slate_from_row
from spd.windows import WindowConfig

CHAT_WINDOW = 20
FREE_SETTINGS = ("output", "overwrite", "block_slates", "workers", "tracking", "endpoint", "rankings", "invalid")
"""Settings that may change while a journal goes on: they decide no answer."""


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", LabelConfig, run, describe)


def run(config: LabelConfig) -> dict[str, object]:
    """Label all slates; returns (and stores) the summary."""
    settings, ids = check(config)
    start_s = time.monotonic()
    journal = journal_uri(config)
    if config.backend == "import":
        labels, errors = import_labels(config), {}
    else:
        with sole_owner(journal, f"{journal!r} is being written by another process: set another output"):
            open_journal(journal, settings)
            errors = ask_teacher(config, ids)
            labels = read_journal(journal)
    counts = Counts()
    chosen = islice(read_slates(config.input), config.max_slates)
    slates = (labelled(slate, labels, errors, config, counts) for slate in chosen)
    write_slates(slates, config.output, rows_per_file=500, overwrite=config.overwrite)
    summary = summarise(config, counts, len(ids)) | {"wall_s": round(time.monotonic() - start_s, 2)}
    write_json(f"{config.output.rstrip('/')}.summary.json", summary)
    print("label: " + ", ".join(f"{key} {value}" for key, value in summary.items()) + f"; written to {config.output}")
    _track(config, summary)
    return summary


def check(config: LabelConfig) -> tuple[dict[str, object], list[str | None]]:
    """Return the settings that decide the answers, and the request_ids; raises what can be known to be wrong."""
    check_workers(config.workers)
    check_target(*resolve_uri(config.output), config.overwrite)
    check_writable(f"{config.output.rstrip('/')}.summary.json")
    ids = read_request_ids(open_slates(config.input), config.input)
    check_unique(name for name in ids if name is not None)
    ids = ids[: config.max_slates]
    settings = {key: value for key, value in config_to_dict(config).items() if key not in FREE_SETTINGS}
    settings["input_ids"] = hashlib.sha256("\n".join(map(str, ids)).encode("utf-8", "replace")).hexdigest()[:16]
    if config.backend == "local":
        artifact = fetch_artifact(config.tracking, config.local.artifact)
        if load_spec(artifact).objective != "ar":
            raise ConfigError(
                f"local.artifact={config.local.artifact!r} is a single-pass ranker: label with an autoregressive one "
                "(jobs.train with objective=ar)"
            )
        settings["teacher_version"] = model_version(artifact)
    if config.backend == "vllm":
        check_vllm(config)
    return settings, ids


def check_vllm(config: LabelConfig) -> None:
    """Raise ConfigError unless vLLM is installed and workers have GPUs."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("backend='vllm': the package vllm is not installed: pip install vllm, or use an endpoint")
    if not config.workers.use_gpu:
        raise ConfigError("backend='vllm' needs GPUs: set workers.use_gpu=true on a cluster that has them")
    if config.num_permutations > 1:
        raise ConfigError("num_permutations above 1 is not there for backend='vllm': use an endpoint")


def journal_uri(config: LabelConfig) -> str:
    """Return where the answers are kept."""
    return f"{config.output.rstrip('/')}.journal"


def ask_teacher(config: LabelConfig, ids: Sequence[str | None]) -> dict[str, str]:
    """Have everything answered that the journal lacks; returns why a slate has no answer, by request_id."""
    done = {name: frozenset(answers) for name, answers in read_journal(journal_uri(config)).items()}
    num_done = sum(len(answers) >= config.num_permutations for answers in done.values())
    print(f"label: {len(ids)} slates, {num_done} answered already", flush=True)
    if num_done == len(ids):
        return {}
    start_ray(config.workers)
    outcomes = pipeline(config, done, frozenset(ids))
    rows = (
        row for table in outcomes.iter_batches(batch_size=None, batch_format="pyarrow") for row in table.to_pylist()
    )
    errors: dict[str, str] = {}
    for row in progress(rows, len(ids), "label: slates"):
        if row["fatal"] is not None:
            raise ConfigError(str(row["fatal"]))
        if row["error"] is not None:
            errors[row["request_id"]] = row["error"]
    return errors


def pipeline(
    config: LabelConfig, done: Mapping[str, frozenset[int]], chosen: frozenset[str | None]
) -> ray.data.Dataset:
    """Return the lazy data set of outcomes: read, ask (actor pool)."""
    workers, rows = config.workers, config.block_slates
    dataset = open_slates(config.input)
    columns = [name for name in ("request_id", "query", "candidates", "score") if name in dataset.schema.names]
    read = ray.data.read_parquet(dataset.files, filesystem=dataset.filesystem).select_columns(columns)
    if config.max_slates is not None:
        read = read.filter(lambda row: row["request_id"] in chosen)
    slates = read.repartition(target_num_rows_per_block=rows)
    task = _task(config, done)
    if config.backend == "vllm":
        return _vllm(config, slates, done)
    if config.backend == "local":
        artifact = str(fetch_artifact(config.tracking, config.local.artifact).absolute())
        teacher: type = LocalTeacher
        arguments: tuple[object, ...] = (task, artifact, config.local, workers.cpus_per_worker)
    else:
        teacher = ChatTeacher
        arguments = (task, config.chat, config.endpoint, workers.num_workers)
    return slates.map_batches(
        teacher,
        fn_constructor_args=arguments,
        batch_size=rows,
        batch_format="pyarrow",
        num_cpus=0 if workers.use_gpu else workers.cpus_per_worker,
        num_gpus=1 if workers.use_gpu else 0,
        compute=ActorPoolStrategy(size=workers.num_workers),
    )


def _task(config: LabelConfig, done: Mapping[str, frozenset[int]]) -> Task:
    """Return what the teacher is told; raises ConfigError for a window that it cannot rank in one answer."""
    limit = CHAT_WINDOW if config.window_size is None else config.window_size
    if config.backend == "local":
        limit = load_spec(fetch_artifact(config.tracking, config.local.artifact)).max_candidates
    size, stride = WindowConfig(size=config.window_size, stride=config.window_stride).resolve(limit)
    return Task(
        journal=journal_uri(_absolute(config)),
        num_permutations=config.num_permutations,
        seed=config.seed,
        window_size=size,
        window_stride=stride,
        done=done,
    )


def _vllm(config: LabelConfig, slates: ray.data.Dataset, done: Mapping[str, frozenset[int]]) -> ray.data.Dataset:
    """Return the outcomes of vLLM's engines (ray.data.llm): prompts, answers, journal. Never run yet: it needs GPUs."""
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    chat = config.chat
    engine = vLLMEngineProcessorConfig(
        model_source=chat.model, batch_size=config.block_slates, concurrency=config.workers.num_workers
    )

    def ask(row: dict[str, object]) -> dict[str, object]:
        sampling = {"temperature": chat.temperature, "max_tokens": chat.max_answer_tokens}
        return {**row, "messages": chat_messages(slate_from_row(row), chat), "sampling_params": sampling}

    def keep(row: dict[str, object]) -> dict[str, object]:
        return {name: row[name] for name in (*SLATE_SCHEMA.names, "generated_text") if name in row}

    answered = build_processor(engine, preprocess=ask, postprocess=keep)(
        slates.filter(lambda row: row["request_id"] not in done)
    )
    return answered.map_batches(
        JournalTexts,
        fn_constructor_args=(journal_uri(_absolute(config)),),
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=1),
    )


def import_labels(config: LabelConfig) -> dict[str, dict[int, Label]]:
    """Return the labels that a file of rankings holds for the slates; prints what matches nothing."""
    assert config.rankings is not None
    rankings = read_rankings(config.rankings)
    labels: dict[str, dict[int, Label]] = {}
    num_unknown = 0
    for slate in read_slates(config.input):
        if slate.request_id not in rankings:
            continue
        answer, unknown = match_ranking(slate, rankings[slate.request_id])
        num_unknown += unknown
        labels[slate.request_id] = {0: Label(request_id=slate.request_id, permutation=0, answer=answer)}
    print(
        f"label: {len(rankings)} rankings read, {len(rankings) - len(labels)} for no slate of the input, "
        f"{num_unknown} ids that are no candidate of their slate"
    )
    return labels


def describe(config: LabelConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: settings, slates, what the journal holds already."""
    settings, ids = check(config)
    answered = 0 if config.backend == "import" else len(read_journal(journal_uri(config)))
    return {"config": config_to_dict(config), "settings": settings, "slates": len(ids), "answered": answered}


def _absolute(config: LabelConfig) -> LabelConfig:
    """Return the config with a local output made absolute: workers run in another folder."""
    filesystem, path = resolve_uri(config.output)
    return replace(config, output=path) if is_local(filesystem) else config


def _track(config: LabelConfig, summary: Mapping[str, object]) -> None:
    tracker = Tracker.open(absolute(config.tracking), f"label-{config.backend}", flatten(config_to_dict(config)))
    values = flatten({name: value for name, value in summary.items() if name != "failed"})
    tracker.log_metrics({key: float(value) for key, value in values.items() if isinstance(value, int | float)})
    tracker.finish()


if __name__ == "__main__":
    raise SystemExit(main())
