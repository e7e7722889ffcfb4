"""The manifest of an artifact's folder: the sha256 of every file in it, and the JSON beside it."""

import json
from collections.abc import Mapping
from pathlib import Path

from spd.backbone import file_sha256
from spd.errors import ArtifactError

SPEC_FILE = "ranker.json"
MANIFEST_FILE = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write the sha256 of every file of the folder into its manifest."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_FILE)
    write_json_object(folder / MANIFEST_FILE, {name: file_sha256(folder / name) for name in names})


def check_manifest(folder: Path) -> None:
    """Raise ArtifactError unless the folder holds exactly the files of its manifest, each with its hash."""
    manifest = read_json_object(folder / MANIFEST_FILE)
    if SPEC_FILE not in manifest:
        raise ArtifactError(f"artifact {str(folder)!r}: {MANIFEST_FILE} lists no {SPEC_FILE}: it is no ranker artifact")
    unlisted = sorted({path.name for path in folder.iterdir()} - manifest.keys() - {MANIFEST_FILE})
    if unlisted:
        raise ArtifactError(f"artifact {str(folder)!r}: {unlisted[0]} is not in {MANIFEST_FILE}: remove it")
    for name, expected in manifest.items():
        if not (folder / name).is_file():
            raise ArtifactError(f"artifact {str(folder)!r}: {name} is missing: copy the whole folder again")
        if (found := file_sha256(folder / name)) != expected:
            raise ArtifactError(
                f"artifact {str(folder)!r}: {name} has sha256 {found[:12]}, {MANIFEST_FILE} says "
                f"{str(expected)[:12]}: the file is corrupt or was edited; copy or train it again"
            )


def read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object of an artifact's file; raises ArtifactError if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ArtifactError(
            f"artifact {str(path.parent)!r}: {path.name} is missing: it is no ranker artifact"
        ) from None
    except ValueError as error:
        raise ArtifactError(f"artifact {str(path.parent)!r}: {path.name} is no JSON ({error}): copy it again") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"artifact {str(path.parent)!r}: {path.name} must hold a JSON object")
    return values


def write_json_object(path: Path, values: Mapping[str, object]) -> None:
    """Write the values as JSON; raises ValueError on NaN or infinity."""
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
