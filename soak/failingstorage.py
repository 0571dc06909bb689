"""A storage that fails for a while: some operations of checkpoints are refused, others end with no answer.

It is put into the processes of a disturbed query, drivers and workers, before any of their code runs
(``site/sitecustomize.py``), and changes the files of local checkpoints from outside.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

#: In the environment of processes whose storage may fail: the file that says until when it does.
VARIABLE = "SOAK_STORAGE"
#: Where all of Python looks for ``sitecustomize``.
SITE = Path(__file__).resolve().parent / "site"
#: In every error, so that a query which ends because of it can be told from others.
REASON = "the soak lets the storage fail"
_MODULE = "anabranch.checkpoint.storage.local"
_READS = ("read", "open", "list_names")
#: These may take effect and fail all the same. `write` is a `write_from`.
_WRITES = ("write_from", "create", "delete")
_NOTES = ".errors"


def let_fail(window: Path, *, for_s: float, rate: float, seed: int) -> None:
    """Let this part of all operations fail from now on, for a while."""
    unfinished = window.with_suffix(".new")
    unfinished.write_text(json.dumps({"until_s": time.time() + for_s, "rate": rate, "seed": seed}))
    unfinished.replace(window)


def errors_of(window: Path) -> Counter[str]:
    """How often which operation has failed, such as ``create unanswered``."""
    notes = window.with_suffix(_NOTES)
    return Counter(notes.read_text().splitlines()) if notes.exists() else Counter()


def install() -> None:
    """Change the storage as soon as this process loads it. Most processes never do."""
    sys.meta_path.insert(0, _Finder(Path(os.environ[VARIABLE])))


class _Finder(MetaPathFinder):
    """Finds one module, as Python does, and changes it once it is loaded."""

    def __init__(self, window: Path) -> None:
        self._window = window

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        loader: Any = found.loader
        execute = loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            change(module.LocalFiles, self._window)

        loader.exec_module = execute_and_change
        return found


def change(files: type, window: Path) -> None:
    """Let the operations of a class of files fail while the window says so."""
    faults = _Faults(window)
    for name in (*_READS, *_WRITES):
        setattr(files, name, _failing(name, getattr(files, name), faults))


class _Faults:
    """Which operations of this process fail. Forked processes draw other ones."""

    def __init__(self, window: Path) -> None:
        self._window = window
        self._draws: tuple[tuple[int, int], random.Random] | None = None

    def draw(self) -> float | None:
        """A number below 1 if an operation is to fail: in which way."""
        try:
            window = json.loads(self._window.read_text())
        except FileNotFoundError:
            return None
        if time.time() > window["until_s"]:
            return None
        place = window["seed"], os.getpid()
        if self._draws is None or self._draws[0] != place:
            self._draws = place, random.Random(f"storage {window['seed']} {os.getpid()}")
        draws = self._draws[1]
        return draws.random() if draws.random() < window["rate"] else None

    def note(self, what: str) -> None:
        """One short write at the end of a file: those of several processes do not mix."""
        notes = os.open(self._window.with_suffix(_NOTES), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(notes, f"{what}\n".encode())
        finally:
            os.close(notes)


def _failing(name: str, operation: Callable[..., Any], faults: _Faults) -> Callable[..., Any]:
    @functools.wraps(operation)
    def failing(*arguments: Any, **named: Any) -> Any:
        way = faults.draw()
        if way is None:
            return operation(*arguments, **named)
        if name in _READS or way < 0.5:
            faults.note(f"{name} refused")
            raise OSError(errno.EIO, REASON)
        operation(*arguments, **named)
        faults.note(f"{name} unanswered")
        raise TimeoutError(errno.ETIMEDOUT, REASON)

    return failing
