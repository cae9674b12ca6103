from __future__ import annotations

from pathlib import Path

import pytest

from errors import ConfigError
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
