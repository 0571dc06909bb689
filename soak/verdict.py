"""The verdict on a run: which rows were lost, doubled or wrong, and whether the state is that of an undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from pyspark.sql import SparkSession

from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import verify
from soak.jobs import Expected, State, Values, plain
from soak.places import Places

_SHOWN = 3


@dataclass(frozen=True)
class Verdict:
    """How what came out differs from what should have."""

    rows: int
    lost: int
    doubled: int
    wrong: int
    #: Sentences about everything that is not as it should be.
    findings: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return not self.findings


def judge(spark: SparkSession, places: Places, expected: Expected) -> Verdict:
    """Compare what a finished query has left behind with what an undisturbed one gives."""
    rows = Counter(map(plain, spark.read.parquet(str(places.output)).collect()))
    verdict = compare(rows, expected)
    findings = [*verdict.findings, *_state_findings(places, expected), *_checkpoint_findings(places)]
    return Verdict(verdict.rows, verdict.lost, verdict.doubled, verdict.wrong, tuple(findings))


def compare(found: Counter[Values], expected: Expected) -> Verdict:
    """Rows only, each as often as in an undisturbed run."""
    wanted = Counter(expected.rows)
    lost, extra = wanted - found, found - wanted
    doubled = Counter({row: count for row, count in extra.items() if row in wanted})
    wrong = extra - doubled
    named = {"lost": lost, "doubled": doubled, "wrong": wrong}
    findings = [
        f"{rows.total()} rows {name}, such as {sorted(rows, key=repr)[:_SHOWN]}" for name, rows in named.items() if rows
    ]
    return Verdict(found.total(), lost.total(), doubled.total(), wrong.total(), tuple(findings))


def _state_findings(places: Places, expected: Expected) -> list[str]:
    found = json.loads(places.state.read_text())
    return state_findings({name: [tuple(row) for row in rows] for name, rows in found.items()}, expected)


def state_findings(found: State, expected: Expected) -> list[str]:
    """In which variables the final state differs."""
    findings = []
    for name, rows in expected.state.items():
        wanted, has = Counter(rows), Counter(found.get(name, []))
        missing, extra = sorted((wanted - has).elements(), key=repr), sorted((has - wanted).elements(), key=repr)
        if missing or extra:
            findings.append(
                f"state {name}: {has.total()} rows instead of {len(rows)}; {len(missing)} missing, such as "
                f"{missing[:_SHOWN]}; {len(extra)} too many, such as {extra[:_SHOWN]}"
            )
    return findings


def _checkpoint_findings(places: Places) -> list[str]:
    report = verify(Storage(str(places.checkpoint)))
    return [f"checkpoint: {problem.path}: {problem.reason}" for problem in report.problems[:_SHOWN]]
