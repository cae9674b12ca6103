from __future__ import annotations

import re
from pathlib import Path

import pytest

from errors import ConfigError
from service.names import NAME_PATTERN, document_id
from service.settings import Settings, load_settings


def test_defaults_have_bounds_and_meanings() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
    assert load_settings().catalogue_url.endswith("/prophetkv-data/catalogue.sqlite")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "70000", "PROPHETKV_PORT"),
        ("RATIO", "1.01", "PROPHETKV_RATIO"),
        ("TOP_K", "many", "PROPHETKV_TOP_K"),
        ("MEMORY_BYTES", "-1", "PROPHETKV_MEMORY_BYTES"),
        ("DEVICE", "tpu", "PROPHETKV_DEVICE"),
        ("REDIS_URL", "http://user:secret@host", "PROPHETKV_REDIS_URL: .*must start with redis://"),
        ("RATOI", "0.5", "unknown setting PROPHETKV_RATOI"),
    ],
)
def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(f"PROPHETKV_{name}", value)
    with pytest.raises(ConfigError, match=message) as raised:
        load_settings()
    assert "secret" not in str(raised.value)


def test_origins_and_hidden_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("PROPHETKV_TOP_K=7\nPROPHETKV_RATIO=0.4\n")
    monkeypatch.setenv("PROPHETKV_RATIO", "0.3")
    monkeypatch.setenv("PROPHETKV_REDIS_URL", "redis://user:swordfish@host:6379/0")
    settings = load_settings(port=9)
    origins, shown = settings.origins(), settings.shown()
    assert (settings.ratio, settings.top_k) == (0.3, 7)
    assert origins["ratio"] == "environment (PROPHETKV_RATIO)"
    assert origins["top_k"] == "file (.env)"
    assert origins["max_tokens"] == "default"
    assert shown["redis_url"] == "redis://user:***@host:6379/0"
    assert "swordfish" not in str(shown)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host/0?password=swordfish&db=1", "redis://host/0?password=***&db=1"),
        ("redis://:swordfish@host/0", "redis://:***@host/0"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock"),
    ],
)
def test_passwords_are_hidden_wherever_a_url_carries_them(url: str, shown: str) -> None:
    assert load_settings(redis_url=url).shown()["redis_url"] == shown


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("notes.md", "notes.md"),
        ("a/README.md", r"a-README\.md-[0-9a-f]{8}"),
        ("b/README.md", r"b-README\.md-[0-9a-f]{8}"),
        ("Annual Report.pdf", r"Annual-Report\.pdf-[0-9a-f]{8}"),
        ("what?.txt", r"what-\.txt-[0-9a-f]{8}"),
        (".hidden", r"hidden-[0-9a-f]{8}"),
        ("x" * 300, r"x{100}-[0-9a-f]{8}"),
        ("?", r"file-[0-9a-f]{8}"),
    ],
)
def test_a_file_has_a_legal_document_id_of_its_own(path: str, expected: str) -> None:
    assert re.fullmatch(expected, document_id(path))
    assert re.fullmatch(NAME_PATTERN, document_id(path))
