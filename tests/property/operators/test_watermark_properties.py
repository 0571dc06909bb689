"""Sessions, windows and duplicates under a watermark do what a simple model of Spark's rules does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH, StageSpec, VariableKind, VariableSpec
from anabranch.operators.aggregate.merge import Merge
from anabranch.operators.aggregate.stage import Emits, _MergeTask
from anabranch.operators.dedup import EXPIRES_AT, DedupTask
from anabranch.operators.dedup import VARIABLE as SEEN
from anabranch.operators.session import VARIABLE as SESSIONS
from anabranch.operators.session import _SessionTask, reduced, united
from support.windowed_state import Row, WindowedState, hash_of, run_epoch

TIME = pa.timestamp("us", tz="UTC")
KEYS = st.sampled_from([None, "a", "b", "c", "dd", "ee"])
SUMS = pa.schema([pa.field("n", pa.int64()), pa.field("latest", pa.int64())])
MERGES = ((Merge.SUM, 0), (Merge.MAX, 0))


@dataclass(frozen=True)
class Epoch:
    rows: list[tuple[str | None, int, int]]
    late_s: int | None
    now_s: int | None


@st.composite
def epochs_of(draw: st.DrawFn) -> list[Epoch]:
    """Epochs of (key, time, number) whose watermark only rises, and whose times are around it."""
    found: list[Epoch] = []
    late: int | None = None
    for _ in range(draw(st.integers(1, 6))):
        now = draw(st.none() | st.integers(0, 60)) if late is None else late + draw(st.integers(0, 12))
        base = now or 0
        times = st.integers(max(0, base - 12), base + 25)
        found.append(Epoch(draw(st.lists(st.tuples(KEYS, times, st.integers(1, 9)), max_size=12)), late, now))
        late = now
    return found


def over(time: int, watermark: int | None) -> bool:
    return watermark is not None and time <= watermark


@dataclass
class SessionModel:
    """Sessions of each key as [start, end, count, greatest]."""

    sessions: dict[str | None, list[list[int]]] = field(default_factory=dict)

    def epoch(self, epoch: Epoch, *, complete: bool) -> Counter[Row]:
        for key, time, gap in epoch.rows:
            if not over(time + gap, epoch.late_s):
                self.sessions.setdefault(key, []).append([time, time + gap, 1, gap])
        for key in self.sessions:
            joined: list[list[int]] = []
            for start, end, count, most in sorted(self.sessions[key]):
                if joined and start <= joined[-1][1]:
                    last = joined[-1]
                    joined[-1] = [last[0], max(last[1], end), last[2] + count, max(last[3], most)]
                else:
                    joined.append([start, end, count, most])
            self.sessions[key] = joined
        shown = Counter(
            (key, (start, end), count, most)
            for key, found in self.sessions.items()
            for start, end, count, most in found
            if complete or over(end, epoch.now_s)
        )
        if not complete:
            for key in self.sessions:
                self.sessions[key] = [s for s in self.sessions[key] if not over(s[1], epoch.now_s)]
        return shown

    def state(self) -> set[Row]:
        return {(hash_of((key,)), key, *session) for key, found in self.sessions.items() for session in found}


@given(epochs_of(), st.booleans())
@settings(deadline=None)
def test_sessions_grow_together_and_end_as_in_the_model(epochs: list[Epoch], complete: bool) -> None:
    value = pa.schema([pa.field("end", TIME), *SUMS])
    variable = VariableSpec(SESSIONS, VariableKind.MAP, value, map_key=pa.schema([pa.field("start", TIME)]))
    spec = StageSpec(StageNumber(1), "sessions", pa.schema([pa.field("k", pa.string())]), (variable,))
    task = _SessionTask(
        spec=spec, position=1, merges=MERGES, ansi=True, complete=complete, has_watermark=True,
        names=["k", "session", "n", "latest"],
    )  # fmt: skip
    state, model = WindowedState(spec), SessionModel()
    for epoch in epochs:
        grouped: dict[tuple[str | None, int, int], list[int]] = {}
        for key, time, gap in epoch.rows:
            grouped.setdefault((key, time, gap), []).append(gap)
        rows = [(hash_of((key,)), key, time, time + gap, len(gaps), gap) for (key, time, gap), gaps in grouped.items()]
        shown = run_epoch(task, state, rows, state.layout.rows, late_s=epoch.late_s, now_s=epoch.now_s)
        assert Counter(shown) == model.epoch(epoch, complete=complete)
        assert set(state.rows.values()) == model.state()


@given(epochs_of(), st.sampled_from([Emits.OVER, Emits.CHANGED]))
@settings(deadline=None)
def test_windows_go_out_when_the_watermark_passes_them(epochs: list[Epoch], emits: Emits) -> None:
    window = pa.struct([pa.field("start", TIME), pa.field("end", TIME)])
    key_schema = pa.schema([pa.field("k", pa.string()), pa.field("window", window)])
    spec = StageSpec(StageNumber(1), "w", key_schema, (VariableSpec("aggregates", VariableKind.VALUE, SUMS),))
    task = _MergeTask(spec, MERGES, True, emits, (1, "end"), ["k", "window", "n", "latest"])
    state = WindowedState(spec)
    model: dict[Row, tuple[int, int]] = {}
    for epoch in epochs:
        partials: dict[Row, tuple[int, int]] = {}
        for key, time, number in epoch.rows:
            at = (key, (time // 10 * 10, time // 10 * 10 + 10))
            count, most = partials.get(at, (0, 0))
            partials[at] = count + 1, max(most, number)
        taken = {at: sums for at, sums in partials.items() if not over(at[1][1], epoch.late_s)}
        for at, (count, most) in taken.items():
            known = model.get(at, (0, 0))
            model[at] = known[0] + count, max(known[1], most)
        gone = {at: sums for at, sums in model.items() if over(at[1][1], epoch.now_s)}
        expected = gone if emits is Emits.OVER else {at: model[at] for at in taken}
        model = {at: sums for at, sums in model.items() if at not in gone}
        rows = [(hash_of((key,)), key, (start, end), *sums) for (key, (start, end)), sums in partials.items()]
        shown = run_epoch(task, state, rows, state.layout.rows, late_s=epoch.late_s, now_s=epoch.now_s)
        assert Counter(shown) == Counter((*at, *sums) for at, sums in expected.items())
        assert {row[1:] for row in state.rows.values()} == {(*at, *sums) for at, sums in model.items()}


@given(epochs_of(), st.sampled_from(["key", "key and time", "within watermark"]))
@settings(deadline=None)
def test_the_first_row_of_a_key_goes_out_until_it_is_forgotten(epochs: list[Epoch], kind: str) -> None:
    within, timed = kind == "within watermark", kind == "key and time"
    key_schema = pa.schema([pa.field("k", pa.string()), *([pa.field("t", TIME)] if timed else [])])
    value = pa.schema([pa.field(EXPIRES_AT, TIME)] if within else [])
    spec = StageSpec(StageNumber(1), "d", key_schema, (VariableSpec(SEEN, VariableKind.VALUE, value),))
    task = DedupTask(
        spec=spec, columns=(0, 1, 2), names=("k", "t", "v"), event_time=(1, ""),
        key_time=1 if timed else None, delay_ms=5000 if within else None,
    )  # fmt: skip
    schema = pa.schema([(HASH, pa.int64()), ("_key0", pa.string()), ("t", TIME), ("v", pa.int64())])
    state = WindowedState(spec)
    #: When each key is forgotten.
    model: dict[Row, int] = {}
    for epoch in epochs:
        expected = []
        for key, time, number in epoch.rows:
            at = (key, time) if timed else (key,)
            if not over(time, epoch.late_s) and at not in model:
                expected.append((key, time, number))
                model[at] = time if timed else time + 5 if within else 10**6
        model = {at: forgotten for at, forgotten in model.items() if not over(forgotten, epoch.now_s)}
        rows = [(hash_of((key, time) if timed else (key,)), key, time, number) for key, time, number in epoch.rows]
        shown = run_epoch(task, state, rows, schema, late_s=epoch.late_s, now_s=epoch.now_s)
        assert Counter(shown) == Counter(expected)
        assert {row[1 : 1 + len(key_schema)] for row in state.rows.values()} == set(model)


@given(st.lists(st.lists(KEYS, max_size=8), max_size=3))
@settings(deadline=None)
def test_rows_that_are_nothing_but_their_key_go_out_once(epochs: list[list[str | None]]) -> None:
    key = pa.schema([pa.field("k", pa.string())])
    spec = StageSpec(StageNumber(1), "d", key, (VariableSpec(SEEN, VariableKind.VALUE, pa.schema([])),))
    task = DedupTask(spec=spec, columns=(0,), names=("k",), event_time=None, key_time=None, delay_ms=None)
    state, schema = WindowedState(spec), pa.schema([(HASH, pa.int64()), ("_key0", pa.string())])
    shown = [
        row
        for keys in epochs
        for row in run_epoch(task, state, [(hash_of((k,)), k) for k in keys], schema, late_s=None, now_s=None)
    ]
    assert Counter(shown) == Counter({(k,) for keys in epochs for k in keys})


@given(st.lists(st.integers(1, 9), max_size=8))
@settings(max_examples=50, deadline=None)
def test_runs_of_any_length_are_merged_in_order(lengths: list[int]) -> None:
    texts = [chr(ord("a") + number % 26) for number in range(sum(lengths))]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def joined(earlier: list[pa.Array], later: list[pa.Array]) -> list[pa.Array]:
        pairs = zip(earlier[0].to_pylist(), later[0].to_pylist(), strict=True)
        return [pa.array([one + other for one, other in pairs], pa.string())]

    (found,) = reduced([pa.array(texts, pa.string())], offsets, joined)  # type: ignore[arg-type]
    assert found.to_pylist() == ["".join(texts[a:b]) for a, b in pairwise(offsets)]


def test_sessions_that_touch_are_one_and_those_of_others_are_not() -> None:
    numbers = np.array
    sessions = united(numbers([1, 0, 0, 0]), numbers([5, 11, 0, 5]), numbers([9, 12, 5, 10]), np.zeros(4, np.int64))
    assert list(zip(sessions.owners, sessions.starts, sessions.ends, strict=True)) == [
        (0, 0, 10),
        (0, 11, 12),
        (1, 5, 9),
    ]
    assert sessions.of_intervals().tolist() == [2, 1, 0, 0]
