"""No Docker engine needed: the compose file against the compose schema, the image's steps read from its file.

That the install steps work is shown by `docker/install.sh` in a fresh virtual environment (CONTRIBUTING.md).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import PREFIX, Settings
from service.version import __version__

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())  # type: ignore[no-any-return]


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_compose_file_follows_the_schema(tmp_path: Path) -> None:
    assert check(COMPOSE).returncode == 0, check(COMPOSE).stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(COMPOSE.read_text().replace("profiles: [cpu]", "profile: cpu"))
    assert check(wrong).returncode == 1


def test_profiles_services_and_exposure(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name: service["profiles"] for name, service in services.items()} == {
        "app-cpu": ["cpu"],
        "app-gpu": ["gpu"],
        "redis": ["cpu", "gpu"],
    }
    for name in ("app-cpu", "app-gpu"):
        service = services[name]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["user"] == "10001:10001"
        assert service["image"].startswith(f"prophetkv:{__version__}")
        assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
        known = {PREFIX + field.upper() for field in Settings.model_fields} | {"HF_HOME"}
        assert set(service["environment"]) <= known
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace > Settings.model_fields["drain_seconds"].default
    redis = services["redis"]
    assert "ports" not in redis
    assert redis["command"][1:5] == ["--save", "", "--appendonly", "no"]
    assert redis["command"][-1] == "allkeys-lfu"
    assert redis["healthcheck"]["test"][0] == "CMD"
    assert compose["networks"]["inner"] == {"internal": True}


def test_the_image_is_pinned_and_not_root() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-bookworm$", DOCKERFILE, re.M)
    assert re.search(r"^USER prophetkv$", DOCKERFILE, re.M)
    assert re.search(r"^HEALTHCHECK ", DOCKERFILE, re.M)
    assert re.search(r'^CMD \["prophetkv", "serve"\]$', DOCKERFILE, re.M)  # exec form: signals reach the server


def test_the_image_gets_every_package() -> None:
    import tomllib

    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M)
    files = {name for line in copied for name in line.split() if not name.startswith("--")}
    assert {package.split(".")[0] for package in packages} | {"errors.py", "constraints.txt"} <= files
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in files - {"/opt/prophetkv"}:
        assert f"!{name}" in ignored, name
        assert (ROOT / name).exists()
