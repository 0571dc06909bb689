"""The soak's own logic: storage that fails on demand, models that go by the time of epochs, and what is drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from soak import failingstorage
from soak.jobs import JOBS
from soak.scenarios import Kind, Wanted, draw
from soak.timed import model_pauses, model_timeouts, times_logged

from anabranch.checkpoint.storage.local import LocalFiles


def failing_files(folder: Path, window: Path) -> LocalFiles:
    class Files(LocalFiles):
        """A class of its own, so that no other test meets the faults."""

    failingstorage.change(Files, window)
    return Files(str(folder), durable=False)


def test_storage_works_until_it_is_told_to_fail_and_again_afterwards(tmp_path: Path) -> None:
    window = tmp_path / "storage.json"
    files = failing_files(tmp_path / "checkpoint", window)
    files.write("a", b"1")
    failingstorage.let_fail(window, for_s=-1.0, rate=1.0, seed=1)
    assert files.read("a") == b"1"
    assert not failingstorage.errors_of(window)


def test_a_read_that_fails_is_refused_and_counted(tmp_path: Path) -> None:
    window = tmp_path / "storage.json"
    files = failing_files(tmp_path / "checkpoint", window)
    failingstorage.let_fail(window, for_s=600.0, rate=1.0, seed=1)
    for _ in range(3):
        with pytest.raises(OSError, match=failingstorage.REASON):
            files.read("a")
    assert failingstorage.errors_of(window) == {"read refused": 3}


def test_a_file_whose_creation_got_no_answer_is_there_and_one_that_was_refused_is_not(tmp_path: Path) -> None:
    window = tmp_path / "storage.json"
    files = failing_files(tmp_path / "checkpoint", window)
    failingstorage.let_fail(window, for_s=600.0, rate=1.0, seed=1)
    unanswered = 0
    for number in range(40):
        with pytest.raises(OSError, match=failingstorage.REASON) as raised:
            files.create(f"{number}", b"")
        is_there = (tmp_path / "checkpoint" / f"{number}").exists()
        assert is_there == isinstance(raised.value, TimeoutError)
        unanswered += is_there
    assert failingstorage.errors_of(window) == {"create unanswered": unanswered, "create refused": 40 - unanswered}
    assert 0 < unanswered < 40


def test_a_process_that_is_told_so_has_a_failing_storage_without_knowing_it(tmp_path: Path) -> None:
    window = tmp_path / "storage.json"
    failingstorage.let_fail(window, for_s=600.0, rate=1.0, seed=1)
    root = Path(failingstorage.__file__).parents[1]
    paths = [str(failingstorage.SITE), str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    code = f"from anabranch.checkpoint.storage import Storage\nStorage({str(tmp_path / 'checkpoint')!r}).read('a')"
    for variable, reason in ((str(window), failingstorage.REASON), ("", "is missing")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), failingstorage.VARIABLE: variable}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert reason in ran.stderr.splitlines()[-1]


def test_the_model_of_pauses_goes_by_the_times_of_epochs() -> None:
    epochs = [
        (10_000, [("a", 1, "red", 0), ("b", 5, "red", 0)]),
        (11_000, [("a", 2, "blue", 1)]),
        (11_500, []),
        (12_499, []),
        (12_600, [("a", 4, "red", 2)]),
        (20_000, []),
    ]
    rows, state = model_pauses(epochs)
    assert rows == [
        ("a", 1, 10_000, "[('red', 1)] [1]"),
        ("b", 5, 10_000, "[('red', 1)] [5]"),
        ("a", 3, 11_000, "[('blue', 1), ('red', 1)] [1, 2]"),
        ("b", 5, 11_500, "away, noticed 0 ms later"),
        ("a", 7, 12_600, "[('blue', 1), ('red', 1)] [2, 4]"),
        ("a", 7, 20_000, "away, noticed 5900 ms later"),
    ]
    assert state == {"total": [], "tags": [], "lately": [], "rows": [("a", 3), ("b", 1)]}


def test_the_model_of_timeouts_lets_a_key_time_out_after_its_time_and_not_at_it() -> None:
    rows, state = model_timeouts([(10_000, [("a", 1, "red", 0)]), (11_500, []), (11_501, [])])
    assert rows == [("a", 1, 1, 10_000, False), ("a", 1, 1, 11_501, True)]
    assert state == {"state": []}


def test_the_times_of_epochs_are_those_that_spark_has_logged_in_the_order_of_epochs(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    for epoch in range(12):
        content = ["v1", json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1000 + epoch}), "{}"]
        (tmp_path / "offsets" / str(epoch)).write_text("\n".join(content))
        (tmp_path / "offsets" / f".{epoch}.crc").write_bytes(b"")
    assert times_logged(tmp_path) == list(range(1000, 1012))


def test_scenarios_of_all_kinds_are_drawn() -> None:
    scenarios = [draw(seed) for seed in range(600)]
    for store in ("memory", "rocksdb", "redis"):
        for is_durable in (True, False):
            for storage_fails in (True, False):
                for is_timed in (True, False):
                    assert any(
                        scenario.store == store
                        and (scenario.checkpoint_interval_s == 0.0) is is_durable
                        and scenario.storage_fails is storage_fails
                        and (JOBS[scenario.job].timed is not None) is is_timed
                        for scenario in scenarios
                    ), (store, is_durable, storage_fails, is_timed)


def test_what_is_wanted_is_not_left_to_chance_and_the_rest_is_as_drawn() -> None:
    for seed in range(50):
        scenario = draw(seed)
        same = Wanted(scenario.job, scenario.store, scenario.checkpoint_interval_s, scenario.storage_fails)
        assert draw(seed, wanted=same) == scenario
        other = draw(seed, wanted=Wanted("pauses", "redis", 3.0))
        assert other == replace(scenario, job="pauses", store="redis", checkpoint_interval_s=3.0)
        assert not draw(seed, wanted=Wanted(failing_storage=False)).storage_fails
        storage = [fault for fault in draw(seed, wanted=Wanted(failing_storage=True)).faults if fault.rate]
        assert storage
        assert all(Kind.STORAGE in fault.kinds for fault in storage)


def test_the_command_line_of_what_is_wanted_says_all_of_it() -> None:
    assert Wanted().options() == ""
    wanted = Wanted("pauses", "redis", 2.0, failing_storage=False)
    assert wanted.options() == "--job pauses --store redis --checkpoint-interval-s 2.0 --no-failing-storage"
    assert Wanted(failing_storage=True).options() == "--failing-storage"


def test_every_point_at_which_a_driver_may_crash_is_there() -> None:
    """In a process of its own, because nothing takes the points away again."""
    code = (
        "from pathlib import Path\n"
        "from soak.crashpoints import CHANGE_POINTS, POINTS, START_POINTS, crash, install\n"
        "for point in (*(f'{point}:3' for point in POINTS), *START_POINTS, *CHANGE_POINTS):\n"
        "    install(point, crash, Path('checkpoint'))\n"
    )
    root = Path(failingstorage.__file__).parents[1]
    paths = [str(root), str(root / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
