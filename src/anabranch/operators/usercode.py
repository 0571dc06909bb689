"""What to show of an error in user code."""

from __future__ import annotations

import traceback
from pathlib import Path

#: How many frames of user code an error shows.
_FRAMES_MAX = 6
_HERE = str(Path(__file__).parent)


def user_traceback(error: Exception) -> str:
    """Returns the innermost frames, as Python shows them, without those of the operators that call user code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_HERE)]
    return "".join(traceback.format_list(frames[-_FRAMES_MAX:]))
