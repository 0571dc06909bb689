import pytest

from anabranch.checkpoint.documents import encode
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import load_route, newest_route, save_route
from anabranch.checkpoint.paths import route_file
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, FencedError
from anabranch.core.ids import Epoch, Generation, RouteVersion, WorkerId
from anabranch.core.routes import Route, initial_route, next_route

FIRST = Generation(1)


def routes(count: int) -> list[Route]:
    """A job that gains a worker with every route."""
    found = [initial_route([WorkerId("w0")], 64, Epoch(0))]
    for number in range(1, count):
        workers = [WorkerId(f"w{worker}") for worker in range(number + 1)]
        found.append(next_route(found[-1], workers, Epoch(number * 10)))
    return found


def test_a_new_job_has_no_route(storage: Storage) -> None:
    assert newest_route(storage) is None


def test_the_newest_route_is_the_one_with_the_largest_version_and_all_stay(storage: Storage) -> None:
    saved = routes(12)
    for route in saved:
        save_route(storage, route, generation=FIRST)
    assert newest_route(storage) == saved[-1]
    assert [load_route(storage, route.version) for route in saved] == saved


def test_a_route_that_was_rolled_back_is_replaced(storage: Storage) -> None:
    before, after = routes(2)
    save_route(storage, after, generation=FIRST)
    other = next_route(before, [WorkerId("w9")], Epoch(5))
    save_route(storage, other, generation=FIRST)
    assert newest_route(storage) == other


def test_a_replaced_driver_cannot_save_a_route(storage: Storage) -> None:
    older, newer = claim_generation(storage, {}), claim_generation(storage, {})
    with pytest.raises(FencedError, match="newer driver"):
        save_route(storage, routes(1)[0], generation=older)
    assert newest_route(storage) is None
    save_route(storage, routes(1)[0], generation=newer)


def test_a_missing_route_is_an_error_that_names_the_file(storage: Storage) -> None:
    with pytest.raises(CheckpointError, match=r"routes/00000007\.json is missing"):
        load_route(storage, RouteVersion(7))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encode({"route": routes(1)[0].to_json()})[:-30],
        encode({}),
        encode({"route": {"version": 7}}),
        encode({"route": routes(1)[0].to_json()}),
    ],
)
def test_a_damaged_route_is_an_error_that_names_the_file(storage: Storage, raw: bytes) -> None:
    storage.write(route_file(RouteVersion(7)), raw)
    with pytest.raises(CheckpointError, match=r"routes/00000007\.json is damaged.*Restore"):
        newest_route(storage)
