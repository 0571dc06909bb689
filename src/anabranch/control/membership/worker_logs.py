"""The logs of workers that a query starts: files below one folder, which stay for as long as they may be wanted."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from pathlib import Path

from anabranch.core.errors import WorkerError
from anabranch.core.ids import WorkerId

logger = logging.getLogger(__name__)

#: What a log has in it if something failed: errors as workers log them, and those that ended one.
_SIGNS = re.compile(rb" ERROR | CRITICAL |^Traceback |^Error: ", re.MULTILINE)


class WorkerLogs:
    """A folder of its own for each query, in the system's temporary directory or where the user says."""

    def __init__(self, place: str = "") -> None:
        self._place = place
        self._folder: Path | None = None
        #: Workers that are gone, not of their own will.
        self._lost: set[WorkerId] = set()

    def path_of(self, worker: WorkerId) -> Path:
        """Where this worker logs. The folder is made when it is first needed."""
        if self._folder is None:
            try:
                if self._place:
                    Path(self._place).mkdir(parents=True, exist_ok=True)
                made = tempfile.mkdtemp(prefix="anabranch-logs-", dir=self._place or None)
            except OSError as error:
                raise WorkerError(
                    f"The logs of workers cannot be written: {error}. Set anabranch.logPath to a directory with room."
                ) from None
            self._folder = Path(made).absolute()
            logger.info("state workers log into %s", self._folder)
        return self._folder / f"{worker}.log"

    def note_lost(self, worker: WorkerId) -> None:
        """The worker is gone: what it has logged is kept, and named."""
        self._lost.add(worker)
        if self._content(worker):
            logger.warning("the log of the state worker %s, which is gone, is %s", worker, self.path_of(worker))

    def close(self) -> None:
        """The query has ended. What says why something failed is kept."""
        if self._folder is None or not self._folder.exists():
            return
        kept = 0
        for log in self._folder.glob("*.log"):
            content = self._content(WorkerId(log.stem))
            if _SIGNS.search(content) or (content and log.stem in self._lost):
                kept += 1
            else:
                log.unlink(missing_ok=True)
        if kept:
            logger.warning("the logs of %d state workers that failed are kept in %s", kept, self._folder)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _content(self, worker: WorkerId) -> bytes:
        try:
            return self.path_of(worker).read_bytes()
        except OSError:
            return b""
