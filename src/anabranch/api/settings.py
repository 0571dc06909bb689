"""Resolves settings, the weakest first: defaults, anabranch.toml, ANABRANCH_*, spark.anabranch.*, writer options."""

from __future__ import annotations

import contextlib
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

from anabranch.control.strategies import MIGRATIONS, strategy_of
from anabranch.core.errors import SettingsError
from anabranch.core.settings import PREFIX, Settings, check_choice, has_password
from anabranch.worker.stores import STORES

logger = logging.getLogger(__name__)

SETTINGS_FILE = "anabranch.toml"
_ENVIRONMENT_PREFIX = "ANABRANCH_"
#: What the terminal commands read, and no query.
_OF_COMMANDS = frozenset({"ANABRANCH_URL"})
_SPARK_PREFIX = "spark."
#: In the mode of a file: all users of the machine can read it.
_OPEN_TO_OTHERS = 0o004


def resolve_settings(spark: SparkSession, options: Mapping[str, Any]) -> Settings:
    """Returns the settings in force for a query with these writer options."""
    _check_prefixes(spark, options)
    _check_secrets(spark)
    settings = Settings.from_texts(
        (SETTINGS_FILE, _from_file(Path(SETTINGS_FILE))),
        ("the environment", _from_environment(os.environ)),
        ("the Spark configuration", _from_spark(spark)),
        ("the writer's options", {name: value for name, value in options.items() if is_setting(name)}),
    )
    _check_choices(settings)
    return settings


def _check_choices(settings: Settings) -> None:
    """Check what only the packages know that settings are for."""
    check_choice("store", settings.store, STORES)
    check_choice("migration", settings.migration, MIGRATIONS)
    strategy = strategy_of(settings.migration, store_is_shared=STORES[settings.store].is_shared)
    if not settings.drain and not strategy.has_drain:
        raise SettingsError(
            f"{PREFIX}drain is false, which is about lazy migration between workers that keep state themselves, "
            f"but {PREFIX}migration is {settings.migration} and {PREFIX}store is {settings.store}. Leave {PREFIX}drain "
            "out."
        )


def is_setting(option: str) -> bool:
    """Tells whether a writer's option is one of Anabranch's, and not one of the sink's."""
    return option.lower().startswith(PREFIX)


def _from_file(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise SettingsError(f"{path} cannot be read: {error}. Correct or remove it.") from None
    section: Mapping[str, Any] = document.get("anabranch", document)
    if path.stat().st_mode & _OPEN_TO_OTHERS and any(map(_is_secret, section.items())):
        logger.warning("other users of this machine can read the secrets in %s: chmod 600 it", path)
    return section


def _is_secret(setting: tuple[str, Any]) -> bool:
    name, value = setting
    plain = name.lower().removeprefix(PREFIX).replace("_", "")
    return plain in ("token", "redispassword") or (plain == "redisurl" and has_password(str(value)))


def _from_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {
        name[len(_ENVIRONMENT_PREFIX) :]: value
        for name, value in environment.items()
        if name.startswith(_ENVIRONMENT_PREFIX) and name not in _OF_COMMANDS
    }


def _from_spark(spark: SparkSession) -> Mapping[str, str]:
    start = _SPARK_PREFIX + PREFIX
    return {
        name[len(_SPARK_PREFIX) :]: value for name, value in _configuration(spark).items() if name.startswith(start)
    }


def _configuration(spark: SparkSession) -> dict[str, str]:
    # Settings given to the session builder are part of the context's configuration.
    return {**dict(spark.sparkContext.getConf().getAll()), **spark.conf.getAll}


def _check_secrets(spark: SparkSession) -> None:
    """Checks that Spark does not show secrets: it hides settings by their names, and it has command lines."""
    found = {name[len(PREFIX) :].lower(): value for name, value in _from_spark(spark).items()}
    if has_password(found.get("redisurl", "")):
        raise SettingsError(
            f"{_SPARK_PREFIX}{PREFIX}redisUrl has a password, which Spark shows in its pages and its event log. Set "
            f"{_SPARK_PREFIX}{PREFIX}redisPassword, which it hides, or ANABRANCH_REDIS_URL."
        )
    for name in ("token", "redisPassword"):
        for process in _showing(found.get(name.lower(), "")):
            logger.warning(
                "all users of this machine can read %s%s%s in the command line of process %d, where Spark puts "
                "settings of its builder and of spark-submit; set ANABRANCH_%s instead, or use a file of settings",
                _SPARK_PREFIX,
                PREFIX,
                name,
                process,
                "TOKEN" if name == "token" else "REDIS_PASSWORD",
            )


def _showing(secret: str) -> list[int]:
    """Returns the processes of this application that have a secret in their command lines."""
    found: list[int] = []
    own = psutil.Process()
    for process in [own, *own.parents(), *own.children(recursive=True)] if secret else []:
        with contextlib.suppress(psutil.Error):
            if any(secret in argument for argument in process.cmdline()):
                found.append(process.pid)
    return found


def _check_prefixes(spark: SparkSession, options: Mapping[str, Any]) -> None:
    """Refuses settings under the wrong prefix, which would have no effect: Spark's configuration has one word more."""
    for name in _configuration(spark):
        if name.lower().startswith(PREFIX):
            raise SettingsError(
                f"The Spark configuration has {name}, which has no effect. Set {_SPARK_PREFIX}{name} instead, and take "
                f"it away: spark.conf.unset({name!r})."
            )
    for name in options:
        if name.lower().startswith(_SPARK_PREFIX + PREFIX):
            raise SettingsError(
                f"The writer has the option {name}, which has no effect. Use option({name[len(_SPARK_PREFIX) :]!r}, …)."
            )
