"""A checkpoint on a full file system: the query says so, and once there is room it goes on as if nothing had been."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from soak.driver import start, state_of
from soak.jobs import JOBS, epochs_of, make_files
from soak.places import Places, write_json
from soak.verdict import judge

import anabranch

JOB = JOBS["aggregate"]
EPOCHS, EPOCHS_BEFORE = 6, 3
#: So many keys that the changes of an epoch take several times the room that is left.
FILES = make_files(3, files=EPOCHS, rows=4000, keys=9000)
SIZE = 16 << 20
#: Enough for what Spark writes when an epoch begins, and too little for the changes of the epoch.
LEFT = 48 << 10


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    places = Places(tmp_path)
    places.checkpoint.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(places.checkpoint)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a small file system is needed, and there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a small file system is needed, and cannot be mounted: {mounted.stderr.strip()}")
    yield places
    subprocess.run(["umount", "--lazy", str(places.checkpoint)], check=True)


def fill(folder: Path, left: int) -> Path:
    """Leave only so many bytes."""
    ballast = folder / "ballast"
    room = int(subprocess.check_output(["df", "--output=avail", "-B1", str(folder)], text=True).split()[-1])
    ballast.write_bytes(bytes(room - left))
    return ballast


def test_a_query_on_a_full_disk_says_so_and_loses_nothing_once_there_is_room(
    spark: SparkSession, places: Places
) -> None:
    places.write_input(FILES[:EPOCHS_BEFORE])
    query = start(spark, JOB, places, files_per_epoch=1)
    try:
        query.processAllAvailable()
        ballast = fill(places.checkpoint, LEFT)
        places.add_input(FILES[EPOCHS_BEFORE:], first=EPOCHS_BEFORE)
        with pytest.raises(anabranch.AnabranchError) as failure:
            query.processAllAvailable()
    finally:
        query.stop()
    assert "No space left on device" in str(failure.value)
    assert "Free space on the file system of the checkpoint, then start the query again" in str(failure.value)
    assert places.committed_epochs() == EPOCHS_BEFORE
    assert list((places.checkpoint / "anabranch").rglob(".*.tmp")) == [], "half a file is left behind"
    ballast.unlink()
    query = start(spark, JOB, places, files_per_epoch=1)
    try:
        query.processAllAvailable()
        write_json(places.state, state_of(query, JOB))
    finally:
        query.stop()
    assert judge(spark, places, JOB.model(epochs_of(FILES, 1))).findings == ()
