"""Slates in files: Parquet or JSON lines at any pyarrow or fsspec URI, streamed in, and Parquet parts out.

A URI is a local file or folder, or has a scheme that pyarrow (`s3://`, `gs://`, ...) or an installed fsspec knows.
A folder means its `.parquet`, `.jsonl` and `.jsonl.gz` files by name, not those that begin with `.` or `_`.
"""

import io
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from spd.errors import DataError
from spd.slate import SLATE_SCHEMA, Slate, slate_from_row, slates_to_table

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
PART_NAME = re.compile(r"part-\d{5,}\.parquet")
BATCH_ROWS = 1024


def read_slates(uri: str | Path) -> Iterator[Slate]:
    """Yield the slates one by one, in file order; DataError names the file, the row and what is wrong with it."""
    for where, row in _located_rows(uri):
        try:
            yield slate_from_row(row)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def read_rows(uri: str | Path) -> Iterator[dict[str, object]]:
    """Yield the rows as they are, unchecked, so that a job can mark a bad one and go on.

    DataError where the URI can't be read, or a line is no JSON object.
    """
    for _, row in _located_rows(uri):
        yield row


def write_slates(
    slates: Iterable[Slate], uri: str | Path, *, rows_per_file: int = 10_000, overwrite: bool = False
) -> int:
    """Write `part-00000.parquet`, ... into the folder `uri` and return how many slates they hold.

    A local folder appears complete or not at all; in an object store each part does. DataError if the folder holds
    anything, unless `overwrite`, which replaces parts written before but never other files.
    """
    if rows_per_file < 1:
        raise DataError(f"rows_per_file={rows_per_file} must be at least 1: the default is 10000")
    filesystem, folder = resolve_uri(uri)
    old_parts = check_target(filesystem, folder, overwrite)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return _write_local(slates, filesystem, Path(folder), rows_per_file)
    for path in old_parts:
        filesystem.delete_file(path)
    filesystem.create_dir(folder)
    return _write_parts(slates, filesystem, folder, rows_per_file)


def resolve_uri(uri: str | Path) -> tuple[pafs.FileSystem, str]:
    """Return the file system and the path inside it."""
    text = str(uri)
    if "://" not in text:
        return pafs.LocalFileSystem(), str(Path(text).absolute())
    reasons: list[str] = []
    for candidate in (text, f"fsspec+{text}"):
        try:
            filesystem, path = pafs.FileSystem.from_uri(candidate)
        except (pa.ArrowException, OSError, ValueError, ImportError) as error:
            reasons.append(_one_line(error))  # pyarrow's own comes first and knows the schemes that it reads
        else:
            return filesystem, path
    raise DataError(
        f"uri={text!r} can't be opened ({reasons[0]}): use a local path, or a scheme that pyarrow or an "
        "installed fsspec package knows, such as s3://bucket/folder"
    )


def _located_rows(uri: str | Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each row with its place, `file:number` from 1."""
    filesystem, path = resolve_uri(uri)
    for file in list_slate_files(filesystem, path, str(uri)):
        rows = _parquet_rows if file.endswith(".parquet") else _json_rows
        try:
            yield from ((f"{file}:{number}", row) for number, row in rows(filesystem, file))
        except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
            raise DataError(f"{file} can't be read ({_one_line(error)}): write it again, or remove it") from error


def list_slate_files(filesystem: pafs.FileSystem, path: str, uri: str) -> list[str]:
    """Return the slate files at the path, sorted by name; DataError if there is none."""
    try:
        info = filesystem.get_file_info(path)
        found = filesystem.get_file_info(pafs.FileSelector(path)) if info.type == pafs.FileType.Directory else [info]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"uri={uri!r} can't be listed ({_one_line(error)}): check the address and its access"
        ) from error
    if info.type == pafs.FileType.NotFound:
        raise DataError(f"uri={uri!r} does not exist: give a folder or file of slates (jobs.prepare writes one)")
    files = sorted(
        item.path for item in found if item.path.endswith(SUFFIXES) and not item.base_name.startswith((".", "_"))
    )
    if not files:
        raise DataError(f"uri={uri!r} holds no slate file: its files must end in {', '.join(SUFFIXES)}")
    return files


def _parquet_rows(filesystem: pafs.FileSystem, path: str) -> Iterator[tuple[int, dict[str, object]]]:
    number = 0
    with filesystem.open_input_file(path) as source:
        parquet = pq.ParquetFile(source)
        columns = [name for name in SLATE_SCHEMA.names if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _json_rows(filesystem: pafs.FileSystem, path: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the objects of a JSON lines file (gunzipped by its name); blank lines are passed over."""
    with filesystem.open_input_stream(path, compression="detect") as source:
        for number, line in enumerate(io.BufferedReader(source), start=1):
            if line.strip():
                yield number, _parse_line(line, f"{path}:{number}")


def _parse_line(line: bytes, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({_one_line(error)}): mend or drop the line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: {str(row)[:40]!r} is no JSON object: write one slate object a line")
    return row


def check_target(filesystem: pafs.FileSystem, folder: str, overwrite: bool) -> list[str]:
    """Return the parts that are there already; raises DataError if they, or other files, forbid writing."""
    if filesystem.get_file_info(folder).type == pafs.FileType.File:
        raise DataError(f"uri={folder!r} is a file: give a folder for the parts")
    found = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    if found and not overwrite:
        raise DataError(f"uri={folder!r} is not empty: choose another folder, or set overwrite=true")
    foreign = [item.base_name for item in found if not PART_NAME.fullmatch(item.base_name)]
    if foreign:
        raise DataError(f"uri={folder!r} holds {foreign[0]!r}, which is no part of a slate set: choose another folder")
    return [item.path for item in found]


def _write_local(slates: Iterable[Slate], filesystem: pafs.FileSystem, target: Path, rows_per_file: int) -> int:
    """Write beside the target, then rename over it; a failure leaves the target as it was."""
    mark = uuid4().hex[:8]
    staging = target.with_name(f".{target.name}.writing-{mark}")
    replaced = target.with_name(f".{target.name}.replaced-{mark}")
    staging.mkdir(parents=True)
    try:
        count = _write_parts(slates, filesystem, str(staging), rows_per_file)
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists():
            replaced.rename(target)
        raise
    if replaced.exists():
        shutil.rmtree(replaced)
    return count


def _write_parts(slates: Iterable[Slate], filesystem: pafs.FileSystem, folder: str, rows_per_file: int) -> int:
    """Return the number of slates written; no slate at all makes one part without rows."""
    remaining = iter(slates)
    count = part = 0
    while (chunk := list(islice(remaining, rows_per_file))) or part == 0:
        pq.write_table(slates_to_table(chunk), f"{folder}/part-{part:05d}.parquet", filesystem=filesystem)
        count += len(chunk)
        part += 1
    return count


def _one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
