"""The journal of labelling: every answer is kept, durably, before anything else happens to it.

A folder of JSON lines beside the output, a subfolder a block of slates. On a local disk the answers of a block are
appended to one file and synced; in an object store each append is an object. A line that a crash tore is passed over:
its answer was not acknowledged. A block that another worker takes up again finds what the first one has answered.
"""

import hashlib
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
    """The journal of one block of slates: what is there of it, and what is added; one writer at a time."""

    def __init__(self, uri: str, request_ids: Sequence[str]) -> None:
        self._filesystem, folder = resolve_uri(uri)
        block = hashlib.sha256("\n".join(request_ids).encode("utf-8", "replace")).hexdigest()[:16]
        self._folder = f"{folder}/{block}"
        self._filesystem.create_dir(self._folder)

    def labels(self) -> dict[str, dict[int, Label]]:
        """Return the block's labels so far, by request_id and permutation."""
        return _by_slate(_labels(self._filesystem, self._folder))

    def append(self, labels: Sequence[Label]) -> None:
        """Keep the labels; they are on disk, or in the store, when this returns."""
        if not labels:
            return
        # the newline before them parts them from a line that a crash tore
        text = "\n" + "".join(json.dumps(asdict(label)) + "\n" for label in labels)
        if is_local(self._filesystem):
            with open(f"{self._folder}/answers{SUFFIX}", "ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            return
        with self._filesystem.open_output_stream(f"{self._folder}/{uuid4().hex}{SUFFIX}") as stream:
            stream.write(text.encode())


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
    """Return all labels by request_id and permutation."""
    return _by_slate(_labels(*resolve_uri(uri)))


def _by_slate(labels: Iterable[Label]) -> dict[str, dict[int, Label]]:
    """Return the labels by request_id and permutation; the first one counts if a slate was asked twice."""
    found: dict[str, dict[int, Label]] = {}
    for label in labels:
        found.setdefault(label.request_id, {}).setdefault(label.permutation, label)
    return found


def _labels(filesystem: pafs.FileSystem, folder: str) -> Iterable[Label]:
    files = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True, recursive=True))
    for path in sorted(info.path for info in files if info.path.endswith(SUFFIX)):
        with filesystem.open_input_stream(path) as stream:
            lines = stream.read().split(b"\n")
        for line in lines:
            try:
                yield Label.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
