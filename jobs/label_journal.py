"""The journal of labelling: every answer is kept, durably, before anything else happens to it.

A folder of JSON lines beside the output. On a local disk each writer appends to a file of its own and syncs it; in an
object store each append is an object. A line that a crash tore is passed over: its answer was not acknowledged.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from uuid import uuid4

import pyarrow.fs as pafs

from jobs.files import is_local, write_json
from spd.answer import Answer
from spd.datasets.files import resolve_uri
from spd.errors import ConfigError

SETTINGS_FILE = "settings.json"
SUFFIX = ".jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What answers took."""

    num_requests: int = 0
    num_passes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            num_requests=self.num_requests + other.num_requests,
            num_passes=self.num_passes + other.num_passes,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """One answer for one slate, in the slate's own indices, with what it took.

    permutation: which shuffle it answers, 0 = the candidates as they stand.
    """

    request_id: str
    permutation: int
    answer: Answer
    cost: Cost = Cost()

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "Label":
        """Return the label of a journal line; raises KeyError or TypeError on a line that holds none."""
        fields = dict(values)
        answer, cost = fields.pop("answer"), fields.pop("cost")
        if not isinstance(answer, dict) or not isinstance(cost, dict):
            raise TypeError("no answer")
        answer["order"] = tuple(answer["order"])
        return cls(answer=Answer(**answer), cost=Cost(**cost), **fields)  # type: ignore[arg-type]


class Journal:
    """Appends labels; one a writer."""

    def __init__(self, uri: str) -> None:
        self._filesystem, self._folder = resolve_uri(uri)
        self._name = uuid4().hex
        self._count = 0

    def append(self, labels: Sequence[Label]) -> None:
        """Keep the labels; they are on disk, or in the store, when this returns."""
        if not labels:
            return
        text = "".join(json.dumps(asdict(label)) + "\n" for label in labels)
        if is_local(self._filesystem):
            with open(f"{self._folder}/{self._name}{SUFFIX}", "ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            return
        with self._filesystem.open_output_stream(f"{self._folder}/{self._name}-{self._count:06d}{SUFFIX}") as stream:
            stream.write(text.encode())
        self._count += 1


def open_journal(uri: str, settings: Mapping[str, object]) -> None:
    """Make the journal, or go on with the one that is there.

    Raises ConfigError if its answers were given under other settings: they would be other labels.
    """
    filesystem, folder = resolve_uri(uri)
    filesystem.create_dir(folder)
    path = f"{folder}/{SETTINGS_FILE}"
    if filesystem.get_file_info(path).type == pafs.FileType.NotFound:
        write_json(f"{uri}/{SETTINGS_FILE}", settings)
        return
    with filesystem.open_input_stream(path) as file:
        before = json.loads(file.read())
    now = json.loads(json.dumps(settings))
    changed = [key for key in now if now[key] != before.get(key)]
    if changed:
        raise ConfigError(
            f"journal {uri!r} holds answers given with another {changed[0]} ({before.get(changed[0])!r}, now "
            f"{now[changed[0]]!r}): set the same to go on, or another output"
        )


def read_journal(uri: str) -> dict[str, dict[int, Label]]:
    """Return the labels by request_id and permutation; the first one counts if a slate was asked twice."""
    filesystem, folder = resolve_uri(uri)
    found: dict[str, dict[int, Label]] = {}
    for label in _labels(filesystem, folder):
        found.setdefault(label.request_id, {}).setdefault(label.permutation, label)
    return found


def _labels(filesystem: pafs.FileSystem, folder: str) -> Iterable[Label]:
    files = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    for path in sorted(info.path for info in files if info.path.endswith(SUFFIX)):
        with filesystem.open_input_stream(path) as stream:
            lines = stream.read().split(b"\n")
        for line in lines:
            try:
                yield Label.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
