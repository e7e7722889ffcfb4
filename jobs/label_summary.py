"""Answers onto slates, and the account of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from jobs.label_config import LabelConfig
from jobs.label_journal import Label
from spd.slate import Slate

NOT_ANSWERED = "not asked, or lost"
NAMES_NOTHING = "the answer names no candidate"


@dataclass(kw_only=True)
class Counts:
    """What the summary adds up."""

    labelled: int = 0
    valid: int = 0
    repeated: int = 0
    missing: int = 0
    out_of_range: int = 0
    answers: int = 0
    requests: int = 0
    passes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, label: Label) -> None:
        """Count one answer."""
        answer = label.answer
        self.answers += 1
        self.valid += answer.is_valid
        self.repeated += answer.num_repeated
        self.missing += answer.num_missing
        self.out_of_range += answer.num_out_of_range
        self.requests += label.num_requests
        self.passes += label.num_passes
        self.input_tokens += label.input_tokens
        self.output_tokens += label.output_tokens


def summarise(config: LabelConfig, counts: Counts, num_slates: int) -> dict[str, object]:
    """Return the counts as JSON values, with the cost at the configured prices."""
    price_in, price_out = config.endpoint.usd_per_million_input_tokens, config.endpoint.usd_per_million_output_tokens
    values = asdict(counts) | {"failed": dict(counts.failed)}
    cost = (counts.input_tokens * price_in + counts.output_tokens * price_out) / 1e6
    return {"slates": num_slates, **values, "cost_usd": round(cost, 6)}


def labelled(
    slate: Slate,
    labels: Mapping[str, Mapping[int, Label]],
    errors: Mapping[str, str],
    config: LabelConfig,
    counts: Counts,
) -> Slate:
    """Return the slate with its answers, or with none, counted with the reason."""
    answers = labels.get(slate.request_id, {})
    given = [answers[permutation] for permutation in sorted(answers) if permutation < config.num_permutations]
    for label in given:
        counts.add(label)
    rankings = [label.answer.order for label in given if _is_kept(label, slate, config)]
    unlabelled = replace(slate, teacher_ranking=None, extra_teacher_rankings=())
    if not rankings:
        reason = NAMES_NOTHING if given else errors.get(slate.request_id, NOT_ANSWERED)
        counts.failed[reason.partition(":")[0]] += 1
        return unlabelled
    counts.labelled += 1
    return replace(unlabelled, teacher_ranking=rankings[0], extra_teacher_rankings=tuple(rankings[1:]))


def _is_kept(label: Label, slate: Slate, config: LabelConfig) -> bool:
    """Return whether an answer is a label: one that names nothing would teach the input order."""
    if label.answer.num_missing == len(slate.candidates):
        return False
    return config.backend == "import" or config.invalid == "repair" or label.answer.is_valid
