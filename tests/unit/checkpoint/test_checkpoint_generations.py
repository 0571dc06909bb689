import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.checkpoint.generations import (
    NO_GENERATION,
    check_generation,
    claim_generation,
    claim_next,
    generation_info,
    latest_generation,
)
from anabranch.checkpoint.paths import generation_file
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, FencedError
from anabranch.core.ids import Generation


def test_generations_count_from_one(storage: Storage) -> None:
    assert latest_generation(storage) == NO_GENERATION
    assert [claim_generation(storage, {}) for _ in range(3)] == [1, 2, 3]
    assert latest_generation(storage) == 3


def test_a_claim_says_who_made_it(storage: Storage) -> None:
    generation = claim_generation(storage, {"host": "driver-1", "pid": 7})
    assert generation_info(storage, generation) == {"host": "driver-1", "pid": 7}


def test_a_damaged_claim_still_takes_its_number(storage: Storage) -> None:
    storage.write(generation_file(Generation(4)), b"")
    assert claim_generation(storage, {}) == 5
    with pytest.raises(CheckpointError, match=r"00000004\.json is damaged"):
        generation_info(storage, Generation(4))


def test_threads_that_claim_at_once_never_share_a_generation(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        owned = list(pool.map(lambda n: claim_generation(storage, {"n": n}), range(40)))
    assert sorted(owned) == list(range(1, 41))
    assert [generation_info(storage, g)["n"] for g in owned] == list(range(40))


def test_processes_that_claim_at_once_never_share_a_generation(storage: Storage) -> None:
    claim = f"""
import sys
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.generations import claim_generation
storage = Storage({storage.location!r})
print("ready", flush=True)
sys.stdin.readline()
print(*[claim_generation(storage, {{}}) for _ in range(25)])
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", claim], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(int(number) for output in outputs for number in output.split()) == list(range(1, 51))


def test_a_claim_that_always_loses_gives_up(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "create", lambda *_: False)
    with pytest.raises(CheckpointError, match="only one query uses this checkpoint"):
        claim_generation(storage, {})


def test_an_older_driver_is_told_to_stop(storage: Storage) -> None:
    older = claim_generation(storage, {})
    check_generation(storage, older)
    newer = claim_generation(storage, {})
    check_generation(storage, newer)
    with pytest.raises(FencedError, match=r"claimed generation 2 .* this driver is generation 1\..*one query"):
        check_generation(storage, older)


def test_a_driver_that_goes_on_as_the_next_generation_does_not_pass_one_that_is_newer(storage: Storage) -> None:
    first = claim_generation(storage, {})
    second = claim_next(storage, first, {"host": "driver-1"})
    assert (second, generation_info(storage, second)) == (2, {"host": "driver-1"})
    claim_generation(storage, {})
    claim_generation(storage, {})
    with pytest.raises(FencedError, match=r"claimed generation 4 .* this driver is generation 2\."):
        claim_next(storage, second, {})
    assert latest_generation(storage) == 4
