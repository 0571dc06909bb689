"""Runs Spark's own StatefulProcessor classes, unchanged, against a local copy of state, in columns."""

from anabranch.operators.process.declare import check_output_mode, checked_time_mode, declare_state
from anabranch.operators.process.frames import run_frames
from anabranch.operators.process.program import FrameSettings, Program, TimeMode
from anabranch.operators.process.rows import run_rows

__all__ = [
    "FrameSettings",
    "Program",
    "TimeMode",
    "check_output_mode",
    "checked_time_mode",
    "declare_state",
    "run_frames",
    "run_rows",
]
