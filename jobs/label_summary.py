"""Answers onto slates, and the account of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from jobs.label_config import LabelConfig
from jobs.label_journal import Cost, Label
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
    cost: Cost = field(default_factory=Cost)
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, label: Label) -> None:
        """Count one answer."""
        answer = label.answer
        self.answers += 1
        self.valid += answer.is_valid
        self.repeated += answer.num_repeated
        self.missing += answer.num_missing
        self.out_of_range += answer.num_out_of_range
        self.cost += label.cost


def summarise(config: LabelConfig, counts: Counts, num_slates: int) -> dict[str, object]:
    """Return the counts as JSON values, with the cost at the configured prices."""
    values = asdict(counts) | {"failed": dict(counts.failed)}
    cost, endpoint = counts.cost, config.endpoint
    paid = cost.input_tokens * endpoint.usd_per_million_input_tokens
    paid += cost.output_tokens * endpoint.usd_per_million_output_tokens
    return {"slates": num_slates, **values, "cost": asdict(cost) | {"usd": round(paid / 1e6, 6)}}


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
