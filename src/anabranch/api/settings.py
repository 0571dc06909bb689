"""Where settings come from, weakest first: defaults, anabranch.toml, ANABRANCH_*, spark.anabranch.*, writer options."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from anabranch.core.errors import SettingsError
from anabranch.core.settings import PREFIX, Settings

SETTINGS_FILE = "anabranch.toml"
_ENVIRONMENT_PREFIX = "ANABRANCH_"
#: What the terminal commands read, and no query.
_OF_COMMANDS = frozenset({"ANABRANCH_URL"})
_SPARK_PREFIX = "spark."


def resolve_settings(spark: SparkSession, options: Mapping[str, Any]) -> Settings:
    """The settings in force for a query with these writer options."""
    _check_prefixes(spark, options)
    return Settings.from_texts(
        (SETTINGS_FILE, _from_file(Path(SETTINGS_FILE))),
        ("the environment", _from_environment(os.environ)),
        ("the Spark configuration", _from_spark(spark)),
        ("the writer's options", {name: value for name, value in options.items() if is_setting(name)}),
    )


def is_setting(option: str) -> bool:
    """Whether a writer's option is one of Anabranch's, and not one of the sink's."""
    return option.lower().startswith(PREFIX)


def _from_file(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise SettingsError(f"{path} cannot be read: {error}. Correct or remove it.") from None
    section: Mapping[str, Any] = document.get("anabranch", document)
    return section


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


def _check_prefixes(spark: SparkSession, options: Mapping[str, Any]) -> None:
    """In Spark's configuration, settings have one more word in front than elsewhere; without it, nobody reads them."""
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
