"""Files that jobs read and write, at local paths and URIs alike."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
from filelock import FileLock, Timeout

from spd.datasets.files import list_slate_files, resolve_uri
from spd.errors import ConfigError, DataError
from spd.slate import REQUIRED_COLUMNS


def write_json(uri: str | Path, values: Mapping[str, object]) -> None:
    """Write the values as JSON, aside and renamed; raises ValueError on NaN or infinity, which JSON does not have."""
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    filesystem, path = resolve_uri(uri)
    folder, _, name = path.rpartition("/")
    filesystem.create_dir(folder)
    aside = f"{folder}/.{name}.part"
    with filesystem.open_output_stream(aside) as file:
        file.write(text.encode())
    filesystem.move(aside, path)


def check_writable(uri: str) -> None:
    """Raise ConfigError if a file could not be written there, before hours of work are spent on it."""
    filesystem, path = resolve_uri(uri)
    folder = path.rpartition("/")[0]
    try:
        filesystem.create_dir(folder)
        if filesystem.get_file_info(path).type == pafs.FileType.Directory:
            raise ConfigError(f"output={uri!r} is a folder: name a file")
        probe = f"{path}.part"
        filesystem.open_output_stream(probe).close()
        filesystem.delete_file(probe)
    except (OSError, ValueError) as error:
        raise ConfigError(f"output={uri!r} cannot be written ({error}): choose another place") from None


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object of a file that a job wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def open_slates(uri: str) -> pads.Dataset:
    """Return the Parquet slates of a folder or URI, unread.

    Raises DataError if it cannot be listed or read, is no Parquet, or lacks a column that a slate needs.
    """
    filesystem, path = resolve_uri(uri)
    files = list_slate_files(filesystem, path, uri)
    other = [file for file in files if not file.endswith(".parquet")]
    if other:
        raise DataError(f"{other[0]!r} is no Parquet: convert it with jobs.prepare (dataset='files')")
    try:
        dataset = pads.dataset(files, filesystem=filesystem, format="parquet")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{uri!r} is no readable Parquet ({str(error).splitlines()[0]}): write it again") from None
    missing = [name for name in REQUIRED_COLUMNS if name not in dataset.schema.names]
    if missing:
        raise DataError(
            f"{uri!r}: column {missing[0]!r} is missing: a slate needs {', '.join(REQUIRED_COLUMNS)}, "
            f"the files have {', '.join(dataset.schema.names) or 'none'}"
        )
    return dataset


def read_request_ids(slates: pads.Dataset, uri: str) -> list[str | None]:
    """Return the id of every row, in order (None where null).

    Raises DataError if a file is broken, ids are no strings, or there is no row.
    """
    kind = slates.schema.field("request_id").type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"{uri!r}: column 'request_id' has type {kind}: it must hold strings")
    try:
        ids: list[str | None] = slates.to_table(columns=["request_id"])["request_id"].to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{uri!r} holds a broken file ({str(error).splitlines()[0]}): write it again") from None
    if not ids:
        raise DataError(f"{uri!r} holds no slate: name a folder with at least one")
    return ids


def is_local(filesystem: pafs.FileSystem) -> bool:
    """Return whether a folder can be renamed there: object stores cannot."""
    return isinstance(filesystem, pafs.LocalFileSystem)


@contextmanager
def sole_owner(uri: str, message: str) -> Iterator[None]:
    """Hold a folder, made if need be; raises ConfigError(message) if another process does (on a local disk only)."""
    filesystem, folder = resolve_uri(uri)
    filesystem.create_dir(folder)
    if not is_local(filesystem):
        yield
        return
    try:
        with FileLock(f"{folder}/.lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError(message) from None
