"""The life of a processor in a task: init, the rows of each key, close; one read of state and one write."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

from anabranch.core.errors import AnabranchError, EpochError
from anabranch.operators.process.grouping import Groups, group_rows
from anabranch.operators.process.local_state import LocalState
from anabranch.operators.process.program import ROWS_MAX, Program
from anabranch.operators.process.variable import Cursor
from anabranch.operators.state import StageState

_log = logging.getLogger(__name__)

#: How many frames of user code an error shows.
_FRAMES_MAX = 6


class Runner(Protocol):
    """Passes rows to user code in one of its forms, and turns what comes back into batches."""

    def run(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Runs user code for the keys from first to end, for each of them at its position in the cursor."""
        ...


class MakeRunner(Protocol):
    def __call__(self, program: Program, groups: Groups, cursor: Cursor, timers: TimerValues) -> Runner: ...


def run_task(
    batches: Iterable[pa.RecordBatch],
    program: Program,
    state: StageState,
    timers: TimerValues | None,
    make_runner: MakeRunner,
) -> Iterator[pa.RecordBatch]:
    """The output of one task. State is written before the last batch is given out."""
    groups = group_rows(batches, program.spec.key)
    local = LocalState(program.spec, groups.keys)
    processor = program.processor
    # The last batch is held back: whoever has seen it may rely on the changes having been sent.
    held: pa.RecordBatch | None = None
    try:
        try:
            processor.init(local.handle)
        except AnabranchError:
            raise
        except Exception as error:
            raise user_error(program, "init", error) from error
        local.handle.close()
        local.read(state)
        runner = make_runner(program, groups, local.handle.cursor, timers or TimerValues())
        for first, end in groups.windows(ROWS_MAX):
            local.begin(first, end)
            for batch in runner.run(first, end):
                if held is not None:
                    yield held
                held = batch
            local.end()
    except BaseException:
        _close_after_failure(program)
        raise
    try:
        processor.close()
    except Exception as error:
        raise user_error(program, "close", error) from error
    state.write(local.changes())
    if held is not None:
        yield held


def _close_after_failure(program: Program) -> None:
    try:
        program.processor.close()
    except Exception:
        # The first error is the one to raise.
        _log.warning("Stage %s: the processor failed in close as well", program.spec.name, exc_info=True)


def user_error(program: Program, where: str, error: Exception) -> EpochError:
    """What to raise for an exception that came out of user code."""
    return EpochError(
        f"Stage {program.spec.name}: {type(program.processor).__name__} failed in {where}: "
        f"{type(error).__name__}: {error}\n{_user_traceback(error)}"
        "Correct the processor or its input and start the query again: it resumes from its checkpoint."
    )


def for_key(key: object) -> str:
    return f"handleInputRows for key {key!r}"


def _user_traceback(error: Exception) -> str:
    here = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(here)]
    return "".join(traceback.format_list(frames[-_FRAMES_MAX:]))
