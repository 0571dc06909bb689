from hypothesis import given
from hypothesis import strategies as st

from anabranch.checkpoint import paths
from anabranch.core.ids import Epoch, Generation, RouteVersion, Run, WorkerId


def test_a_change_file_is_found_by_stage_variable_epoch_generation_run_and_worker() -> None:
    path = paths.change_file(
        "stage2", "count", epoch=Epoch(12), generation=Generation(3), run=Run(5), worker=WorkerId("10.0.0.7:9000")
    )
    assert path == "anabranch/changes/stage2/count/epoch=000000000012/g00000003-r5-10.0.0.7%3A9000.parquet"


def test_names_lead_back_to_numbers() -> None:
    assert paths.generation_of(paths.generation_file(Generation(7)).rsplit("/")[-1]) == 7
    assert paths.route_version_of(paths.route_file(RouteVersion(8)).rsplit("/")[-1]) == 8
    assert paths.manifest_of(paths.manifest_file(Epoch(9), Generation(2)).rsplit("/")[-1]) == (9, 2)
    assert paths.spark_batch_of("10") == 10


def test_names_of_other_files_lead_nowhere() -> None:
    for name in ["7.json", "00000007.json.tmp", "notes.txt", "00000007"]:
        assert paths.generation_of(name) is None
        assert paths.route_version_of(name) is None
        assert paths.manifest_of(name) is None
    for name in ["10.tmp", "x10", "-1", ""]:
        assert paths.spark_batch_of(name) is None


def test_ordinary_names_stay_readable() -> None:
    for name in ["count", "stage2", "last_seen-at", "worker.1"]:
        assert paths.safe_name(name) == name


@given(st.text(max_size=300))
def test_every_name_becomes_one_harmless_path_component(name: str) -> None:
    safe = paths.safe_name(name)
    assert 0 < len(safe.encode()) <= 120
    assert not set(safe) & set("/\\*?[]{}=:'\" \0")
    assert not safe.startswith(".")


@given(st.lists(st.text(max_size=200), min_size=2, max_size=2, unique=True))
def test_different_names_become_different_components(names: list[str]) -> None:
    assert paths.safe_name(names[0]) != paths.safe_name(names[1])
