"""Imports point one way, and what is touched by one module only is touched by that module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "cache_store", "retriever", "service", "benchmarks")

# Package -> what else of ours it may import.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "cache_store": {"errors"},
    "retriever": {"errors"},
    "engine": {"errors", "cache_store.base", "cache_store.codec", "cache_store.keys"},
    "service": {"errors", "engine", "cache_store", "retriever"},
    "benchmarks": {"errors", "engine", "cache_store", "retriever", "service"},
}
# Library -> the modules that may import it.
ONLY = {
    "transformers": {"engine/model.py"},
    "triton": {f"engine/kernels/{name}.py" for name in ("common", "attend", "column_sums", "decode", "place")},
    "redis": {"cache_store/redis.py"},
    "faiss": {"retriever/index.py"},
    "sentence_transformers": {"retriever/embedding.py"},
    "fastapi": {"service/app.py"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
    "joblib": set(),
}


def sources() -> list[Path]:
    return [ROOT / "errors.py", *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    package = name.split("/")[0].removesuffix(".py")
    for module in imports(path):
        top = module.split(".")[0]
        if top in ALLOWED and top != package:
            assert {top, module} & ALLOWED[package], f"{name} imports {module}"
        if top in ONLY:
            assert name in ONLY[top], f"{name} imports {module}"


def test_a_violation_would_be_seen() -> None:
    assert "transformers" in set(imports(ROOT / "engine/model.py"))
    assert {name.split(".")[0] for name in imports(ROOT / "service/runtime.py")} >= {
        "engine",
        "cache_store",
        "retriever",
    }


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_reads_the_environment_or_unpickles(path: Path) -> None:
    text = path.read_text()
    if path.name != "settings.py":
        assert "os.environ" not in text
        assert "getenv" not in text
    assert "torch.load" not in text
    assert "allow_pickle" not in text


def test_every_package_is_shipped() -> None:
    import tomllib

    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in sources() if path.name == "__init__.py"
    }
    assert set(told["packages"]) == folders
    assert told["py-modules"] == ["errors"]
