"""The directory of results: nobody else's files are touched, and the lines of an epoch are written once."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from anabranch.core.errors import SettingsError
from anabranch.demo.job import LatencySink
from anabranch.demo.output import claim_output
from anabranch.workload.latency import Latencies, read_latencies

START_MS = 1_700_000_000_000
SUMMARY = {"rows": {"source": 4, "sink": 3}, "rescales": []}
RESCALE = {
    "what": "4 workers, parallelism 4 of stage 3",
    "state": "done",
    "asked_ms": START_MS + 1000,
    "ended_ms": START_MS + 2500,
    "first_output_ms": START_MS + 3000,
    "seconds": 1.5,
}


def latencies(*values_ms: int) -> Latencies:
    return Latencies(np.arange(len(values_ms)) + START_MS, np.array(values_ms, np.int64))


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
    assert [path.name for path in written] == ["latency.csv", "latency.svg", "latency.png", "summary.json"]
    assert all(path.stat().st_size for path in written)
    assert json.loads(output.summary.read_text()) == SUMMARY
    assert not output.epochs.exists()
    (folder / "notes.txt").write_text("mine")
    with claim_output(folder) as output:
        assert sorted(path.name for path in folder.iterdir()) == [".anabranch-demo", "epochs", "notes.txt"]


def test_several_runs_leave_one_picture_with_each_rescale_marked(tmp_path: Path) -> None:
    with claim_output(tmp_path) as output:
        summaries = {}
        for number, name in enumerate(("lazy", "restart")):
            part = output.part(name)
            LatencySink(part.epochs).note(0, latencies(*[40 + number] * 4000))
            summaries[name] = SUMMARY | {"rescales": [RESCALE]}
            part.write_results(summaries[name], title=name)
        written = output.write_comparison(summaries, title="both")
    assert [path.name for path in written] == ["comparison.svg", "comparison.png", "summary.json"]
    assert json.loads(output.summary.read_text()) == summaries
    assert sorted(path.name for path in (tmp_path / "lazy").iterdir()) == [
        "latency.csv",
        "latency.png",
        "latency.svg",
        "summary.json",
    ]
    drawn = output.comparison[0].read_text()
    # Texts are drawn as outlines, and each is named in a comment.
    for text in ("rescale: 4 workers", "done, 1.5 s", "lazy", "restart", "both"):
        assert drawn.count(f"<!-- {text} -->") == (2 if text in ("rescale: 4 workers", "done, 1.5 s") else 1)
    with claim_output(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".anabranch-demo", "epochs"]


def test_without_matplotlib_there_is_all_but_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with claim_output(tmp_path) as output:
        part = output.part("lazy")
        LatencySink(part.epochs).note(0, latencies(5, 6, 7))
        written = part.write_results(SUMMARY, title="a title")
        compared = output.write_comparison({"lazy": SUMMARY}, title="both")
    assert [path.name for path in written] == ["latency.csv", "summary.json"]
    assert [path.name for path in compared] == ["summary.json"]


def test_two_demonstrations_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        claim_output(tmp_path),
        pytest.raises(SettingsError, match="another demonstration is writing"),
        claim_output(tmp_path),
    ):
        pass


def test_a_run_without_rows_has_a_summary_and_no_plot(tmp_path: Path) -> None:
    with claim_output(tmp_path) as output:
        written = output.write_results({"rows": {"source": 0, "sink": 0}, "rescales": []}, title="")
    assert [path.name for path in written] == ["summary.json"]


def test_an_epoch_that_is_run_again_replaces_its_lines(tmp_path: Path) -> None:
    sink = LatencySink(tmp_path)
    sink.note(0, latencies(1, 2))
    sink.note(1, latencies(30, 40, 50))
    sink.note(1, latencies(3, 4, 5))
    assert read_latencies(tmp_path).latency_ms.tolist() == [1, 2, 3, 4, 5]
    assert (sink.rows_of(0), sink.rows_of(1), sink.rows_of(2)) == (2, 3, 0)
    assert (sink.rows_until(0), sink.rows_until(7)) == (2, 5)


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
    assert [(point.reached_s, point.p50_ms, point.p99_ms) for point in sink.history()] == [
        (100, 900, 900),
        (104, 10, 20),
    ]
