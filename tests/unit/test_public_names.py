"""The public surface: what `from anabranch import …` offers, and what importing it costs."""

import subprocess
import sys

import anabranch

PUBLIC = [
    "AnabranchError",
    "BroadcastTable",
    "CheckpointError",
    "EpochError",
    "FencedError",
    "LostWorkerError",
    "Settings",
    "SettingsError",
    "Stream",
    "StreamQuery",
    "UnsupportedError",
    "WorkerError",
    "__version__",
    "broadcast",
    "disable",
    "enable",
    "stream",
]


def test_the_public_names_are_these_and_sorted() -> None:
    assert anabranch.__all__ == PUBLIC == sorted(PUBLIC)


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(anabranch, name) is not None


def test_every_error_is_public_and_one_of_ours() -> None:
    from anabranch.core import errors

    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(kinds) == {name for name in PUBLIC if name.endswith("Error")}
    assert all(issubclass(kind, anabranch.AnabranchError) for kind in kinds.values())
    assert all(getattr(anabranch, name) is kind for name, kind in kinds.items())


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(anabranch, "streams")


def test_workers_do_not_pay_for_pyspark() -> None:
    program = (
        "import sys, anabranch.worker.server.process; print([m for m in sys.modules if m.split('.')[0] == 'pyspark'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
