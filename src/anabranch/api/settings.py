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
    found = {name[len(_SPARK_PREFIX) :]: value for name, value in spark.conf.getAll.items() if name.startswith(start)}
    # Settings given to the session builder are part of the context's configuration.
    context = spark.sparkContext.getConf().getAll()
    return {**{name[len(_SPARK_PREFIX) :]: value for name, value in context if name.startswith(start)}, **found}
