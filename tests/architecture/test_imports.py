"""The arrow of imports, and modules that do nothing but define."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN_IN_SPD = {"ray", "mlflow", "fastapi", "deepspeed", "jobs", "serve_app"}
LAYERS = [
    {"errors"},
    {"slate", "config", "schedule", "head", "answer"},
    {"prompt", "sinkhorn", "metrics", "teacher", "targets", "backbone"},
    {"batch", "decode", "datasets"},
    {"model", "manifest", "windows"},
    {"artifact"},
    {"ranker", "autoregressive"},
]
SPD = sorted((ROOT / "spd").rglob("*.py"))
MODULES = [path for folder in ("spd", "jobs", "serve_app") for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> list[str]:
    """Return the dotted names of all modules that a file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def layer(name: str) -> int:
    return next(place for place, names in enumerate(LAYERS) if name in names)


@pytest.mark.parametrize("path", SPD, ids=lambda path: str(path.relative_to(ROOT)))
def test_spd_imports_only_along_the_arrow(path: Path) -> None:
    relative = path.relative_to(ROOT / "spd")
    own = relative.parts[0].removesuffix(".py")
    names = imported(path)

    assert not {name.partition(".")[0] for name in names} & FORBIDDEN_IN_SPD
    if own != "__init__":
        inner = {name.split(".")[1] for name in names if name.startswith("spd.")}
        assert all(layer(name) <= layer(own) for name in inner)


def test_jobs_and_the_endpoint_do_not_import_each_other_but_in_the_demo() -> None:
    for path in MODULES:
        names = {name.partition(".")[0] for name in imported(path)}
        if path.parts[-2] == "serve_app":
            assert "jobs" not in names, path
        if path.parts[-2] == "jobs" and path.name != "demo.py":
            assert "serve_app" not in names, path


def test_only_one_module_imports_mlflow() -> None:
    users = [path.name for path in MODULES if any(name.partition(".")[0] == "mlflow" for name in imported(path))]

    assert users == ["tracking.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_only_defines(path: Path) -> None:
    allowed = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
    )
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_guard = isinstance(node, ast.If)  # `if __name__ == "__main__"`, `if TYPE_CHECKING`
        is_handler_table = path.name == "ingress.py" and isinstance(node, ast.Expr)
        assert isinstance(node, allowed) or is_docstring or is_guard or is_handler_table, ast.unparse(node)


def test_the_core_imports_without_ray() -> None:
    code = (
        "import sys, spd.ranker, spd.datasets.files; print(sorted({'ray', 'mlflow', 'deepspeed'} & set(sys.modules)))"
    )

    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert found.strip() == "[]"
