"""Where settings come from, and which source wins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.api.settings import is_setting, resolve_settings
from anabranch.core.errors import SettingsError
from anabranch.core.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for setting in ("WORKERS", "KEY_GROUPS", "TOKEN"):
        monkeypatch.delenv(f"ANABRANCH_{setting}", raising=False)


def session(context: dict[str, str] | None = None, runtime: dict[str, str] | None = None) -> Any:
    """A session with settings of its builder and settings made later."""
    configuration = SimpleNamespace(getAll=lambda: list((context or {}).items()))
    return SimpleNamespace(
        conf=SimpleNamespace(getAll={**(context or {}), **(runtime or {})}),
        sparkContext=SimpleNamespace(getConf=lambda: configuration),
    )


def test_without_any_source_the_defaults_hold() -> None:
    assert resolve_settings(session(), {}) == Settings()


def test_each_source_is_stronger_than_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "anabranch.toml").write_text(
        "[anabranch]\nworkers = 3\nstore = 'rocksdb'\nkeyGroups = 8\ntoken = 'f'\n"
    )
    assert resolve_settings(session(), {}) == Settings(workers=3, store="rocksdb", key_groups=8, token="f")
    monkeypatch.setenv("ANABRANCH_WORKERS", "4")
    monkeypatch.setenv("ANABRANCH_KEY_GROUPS", "16")
    monkeypatch.setenv("ANABRANCH_TOKEN", "e")
    assert resolve_settings(session(), {}) == Settings(workers=4, store="rocksdb", key_groups=16, token="e")
    context = {"spark.anabranch.workers": "5", "spark.anabranch.keyGroups": "32", "spark.master": "local"}
    assert resolve_settings(session(context), {}) == Settings(workers=5, store="rocksdb", key_groups=32, token="e")
    spark = session(context, {"spark.anabranch.workers": "6"})
    assert resolve_settings(spark, {}).workers == 6
    options = {"Anabranch.Workers": "7", "path": "x"}
    assert resolve_settings(spark, options) == Settings(workers=7, store="rocksdb", key_groups=32, token="e")


def test_a_file_without_a_section_is_all_settings(tmp_path: Path) -> None:
    (tmp_path / "anabranch.toml").write_text("workerAddresses = ['a:1', 'b:2']\nroutingCache = false\n")
    settings = resolve_settings(session(), {})
    assert settings.worker_addresses == ("a:1", "b:2")
    assert settings.worker_count == 2
    assert settings.routing_cache is False


@pytest.mark.parametrize("text", ["[anabranch", "= 3", "workers = \n"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "anabranch.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"anabranch\.toml cannot be read.*Correct or remove it"):
        resolve_settings(session(), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), ("0", False), (" False ", False)],
)
def test_switches_are_read_as_spark_writes_them(text: str, expected: bool) -> None:
    assert resolve_settings(session(), {"anabranch.routingCache": text}).routing_cache is expected


def test_addresses_may_have_spaces_and_empty_places() -> None:
    settings = resolve_settings(session(), {"anabranch.workerAddresses": " host-1:7077 , [::1]:80,, "})
    assert settings.worker_addresses == ("host-1:7077", "[::1]:80")


def test_only_names_with_the_prefix_are_settings() -> None:
    assert [is_setting(name) for name in ("anabranch.x", "ANABRANCH.X", "anabranchx", "path")] == [
        True,
        True,
        False,
        False,
    ]


def test_every_setting_is_described_under_the_name_that_users_write() -> None:
    described = Settings.describe()
    assert all(name.startswith("anabranch.") and doc for name, _, doc in described)
    for name, default, _ in described:
        text = ",".join(default) if isinstance(default, tuple) else str(default)
        assert Settings.from_texts(("a test", {name: text})) == Settings()
