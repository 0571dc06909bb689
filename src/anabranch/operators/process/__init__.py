"""Runs Spark's own StatefulProcessor classes, unchanged, against a local copy of state, in columns."""

from anabranch.operators.process.declare import check_arguments, declare_state
from anabranch.operators.process.frames import run_frames
from anabranch.operators.process.program import FrameSettings, Program
from anabranch.operators.process.rows import run_rows

__all__ = ["FrameSettings", "Program", "check_arguments", "declare_state", "run_frames", "run_rows"]
