"""Rankings made elsewhere: TREC run files, or JSON lines of candidate ids, read into labels by candidate id."""

import io
import json
from collections.abc import Iterator, Sequence

import pyarrow.fs as pafs

from spd.answer import Answer
from spd.datasets.files import resolve_uri
from spd.errors import DataError
from spd.slate import Slate

TREC_FIELDS = 6
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


def read_rankings(uri: str) -> dict[str, list[str]]:
    """Return each request's candidate ids, best first; a file whose name ends in .jsonl is JSON lines, else TREC.

    Raises DataError naming the line that is neither, or a request that has two rankings.
    """
    filesystem, path = resolve_uri(uri)
    if filesystem.get_file_info(path).type != pafs.FileType.File:
        raise DataError(f"rankings={uri!r} is no file: give a TREC run file or JSON lines")
    try:
        with filesystem.open_input_stream(path, compression="detect") as stream:
            lines = enumerate(io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8"), start=1)
            return _json_rankings(uri, lines) if uri.endswith(JSON_SUFFIXES) else _trec_rankings(uri, lines)
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise DataError(f"rankings={uri!r} can't be read ({str(error).splitlines()[0]}): write it again") from None


def match_ranking(slate: Slate, ids: Sequence[str]) -> tuple[Answer, int]:
    """Return the ranking in the slate's indices, which may be a prefix, and how many ids are none of its candidates.

    A candidate that the ranking leaves out is not placed; of two candidates with one id the first is meant.
    """
    place: dict[str, int] = {}
    for index, candidate in enumerate(slate.candidates):
        place.setdefault(candidate.id, index)
    known = [place[name] for name in ids if name in place]
    order = tuple(dict.fromkeys(known))
    answer = Answer(
        order=order,
        num_repeated=len(known) - len(order),
        num_missing=len(slate.candidates) - len(order),
    )
    return answer, len(ids) - len(known)


def _trec_rankings(uri: str, lines: Iterator[tuple[int, str]]) -> dict[str, list[str]]:
    """Read `query Q0 document rank score tag`; documents of a query are sorted by rank."""
    found: dict[str, list[tuple[int, str]]] = {}
    for number, line in lines:
        if not line.strip():
            continue
        fields = line.split()
        if len(fields) != TREC_FIELDS or not fields[3].isdigit():
            raise DataError(f"{uri}:{number}: no TREC run line (`query Q0 document rank score tag`): mend or drop it")
        found.setdefault(fields[0], []).append((int(fields[3]), fields[2]))
    return {query: [document for _, document in sorted(rows)] for query, rows in found.items()}


def _json_rankings(uri: str, lines: Iterator[tuple[int, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            request_id, ranking = row["request_id"], row["ranking"]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise DataError(f"{uri}:{number}: no object with request_id and ranking: mend or drop the line") from None
        if not isinstance(request_id, str) or not isinstance(ranking, list):
            raise DataError(f"{uri}:{number}: request_id must be a string, ranking a list of candidate ids")
        if request_id in found:
            raise DataError(f"{uri}:{number}: request_id={request_id!r} has a ranking already: keep one")
        found[request_id] = [str(name) for name in ranking]
    return found
