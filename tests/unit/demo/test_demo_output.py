"""The directory of results: nobody else's files are touched, and the lines of an epoch are written once."""

import json
from pathlib import Path

import numpy as np
import pytest

from anabranch.core.errors import SettingsError
from anabranch.demo.output import claim_output
from anabranch.demo.sink import LatencySink
from anabranch.workload.latency import Latencies, read_latencies

SUMMARY = {"rows": {"source": 4, "sink": 3}}


def latencies(*values_ms: int) -> Latencies:
    return Latencies(np.arange(len(values_ms)) + 1_700_000_000_000, np.array(values_ms, np.int64))


def test_a_directory_with_files_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("mine")
    with pytest.raises(SettingsError, match="not empty and not from an earlier demonstration"), claim_output(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert (tmp_path / "summary.json").read_text() == "mine"


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="which is a file"), claim_output(tmp_path / "file"):
        pass


def test_the_results_of_an_earlier_demonstration_are_replaced_but_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with claim_output(folder) as output:
        (output.checkpoint / "below").mkdir(parents=True)
        LatencySink(output.epochs).note(0, latencies(5, 6, 7))
        written = output.write_results(SUMMARY, title="a title")
    assert [path.name for path in written] == ["latency.csv", "latency.png", "summary.json"]
    assert all(path.stat().st_size for path in written)
    assert json.loads(output.summary.read_text()) == SUMMARY
    assert not output.epochs.exists()
    (folder / "notes.txt").write_text("mine")
    with claim_output(folder) as output:
        assert sorted(path.name for path in folder.iterdir()) == [".anabranch-demo", "epochs", "notes.txt"]


def test_two_demonstrations_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        claim_output(tmp_path),
        pytest.raises(SettingsError, match="another demonstration is writing"),
        claim_output(tmp_path),
    ):
        pass


def test_a_run_without_rows_has_a_summary_and_no_plot(tmp_path: Path) -> None:
    with claim_output(tmp_path) as output:
        written = output.write_results({"rows": {"source": 0, "sink": 0}}, title="")
    assert [path.name for path in written] == ["summary.json"]


def test_an_epoch_that_is_run_again_replaces_its_lines(tmp_path: Path) -> None:
    sink = LatencySink(tmp_path)
    sink.note(0, latencies(1, 2))
    sink.note(1, latencies(30, 40, 50))
    sink.note(1, latencies(3, 4, 5))
    assert read_latencies(tmp_path).latency_ms.tolist() == [1, 2, 3, 4, 5]
    assert (sink.rows_of(0), sink.rows_of(1), sink.rows_of(2)) == (2, 3, 0)


def test_epochs_that_do_not_count_are_discarded(tmp_path: Path) -> None:
    sink = LatencySink(tmp_path)
    for epoch in range(3):
        sink.note(epoch, latencies(epoch))
    sink.discard_after(0)
    assert read_latencies(tmp_path).latency_ms.tolist() == [0]
    assert sink.rows_of(1) == 0


def test_only_the_last_seconds_are_recent(tmp_path: Path) -> None:
    now_s = [100.0]
    sink = LatencySink(tmp_path, monotonic_s=lambda: now_s[0])
    sink.note(0, latencies(900))
    now_s[0] += 4
    sink.note(1, latencies(10, 20))
    assert sink.recent_latencies().latency_ms.tolist() == [900, 10, 20]
    now_s[0] += 2
    assert sink.recent_latencies().latency_ms.tolist() == [10, 20]
    now_s[0] += 10
    assert sink.recent_latencies().latency_ms.tolist() == []
