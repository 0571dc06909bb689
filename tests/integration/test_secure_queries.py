"""Queries and those who should not get at them: strangers of this machine, foreign certificates, readers of pages."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from anabranch.cli.job_api import JobApi
from anabranch.core import requests
from anabranch.core.errors import SettingsError, WorkerError
from anabranch.wire import keyring
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from support.certificates import Authority
from support.live_query import WAIT_S, LiveQuery, worker_process

JOB_ID = "0" * 32


@pytest.fixture
def live(spark: SparkSession, tmp_path: Path) -> LiveQuery:
    return LiveQuery(spark, tmp_path)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "certificates")


def files_of(credentials: Credentials) -> dict[str, str]:
    """As settings of a query."""
    return {
        "tlsCertificate": credentials.certificate,
        "tlsKey": credentials.key,
        "tlsAuthority": credentials.authority,
    }


def options_of(credentials: Credentials) -> list[str]:
    """As options of a worker."""
    names = {"certificate": credentials.certificate, "key": credentials.key, "authority": credentials.authority}
    return [text for name, value in names.items() if value for text in (f"--tls-{name}", value)]


def post(url: str, path: str, **headers: str) -> int:
    request = urllib.request.Request(url + path, b"{}", {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def strangers_get_nothing(address: str) -> None:
    """Nobody reads, forges, fences or deletes anything without the token."""
    for token in ("", "guess"):
        client = WorkerClient(address, timeout_s=20, credentials=Credentials(token))
        for request in (
            requests.Health(),
            requests.Describe(job=JOB_ID, generation=99),
            requests.CloseJob(job=JOB_ID, generation=99),
            requests.Wipe(job=JOB_ID, generation=99),
            requests.Flush(job=JOB_ID, generation=99, deferred=()),
        ):
            with pytest.raises(WorkerError, match="asks for another token"):
                client.call(request)
        scan = requests.Scan(job=JOB_ID, generation=99, epoch=0, stage=1, variable="x")
        with pytest.raises(WorkerError, match="asks for another token"):
            list(client.stream(scan))
        client.close()


def command_lines() -> Iterator[str]:
    """Those of this process, and of all that it has started."""
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())


def test_strangers_on_this_machine_get_nothing_and_programs_of_the_same_user_find_the_token(live: LiveQuery) -> None:
    with live.running(workers=2, migration="restart") as query:
        live.run(2)
        token = query.token
        assert len(token) > 40
        entry = keyring.find(query.url)
        assert entry is not None
        assert entry.credentials.token == token
        home = Path.home() / ".anabranch"
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}
        for worker in query.workers():
            strangers_get_nothing(worker["address"])
        for path in ("/rescale", "/workers", "/workers/worker-1/drain", "/savepoint", "/stop", "/scale"):
            assert post(query.url, path) == post(query.url, path, authorization="Bearer guess") == 401
            assert post(query.url, f"{path}?token={token}") == 400
        with urllib.request.urlopen(f"{query.url}/job", timeout=WAIT_S) as response:
            assert json.load(response)["workers"] == 2
        assert not any(token in line for line in command_lines())
        rescale = query.rescale(workers=1)
        assert rescale.wait(WAIT_S)
        assert (query.token, len(query.workers())) == (token, 1)
        strangers_get_nothing(query.workers()[0]["address"])
        live.run()
        live.assert_exact(same_run=False)
        url = query.url
    assert keyring.find(url) is None


def test_a_worker_without_the_token_is_not_let_in_and_the_query_goes_on(live: LiveQuery) -> None:
    with live.running(workers=1) as query, worker_process("--id", "stranger") as (_, stranger):
        live.run(2)
        api = JobApi(query.url, Credentials())
        # The job knows where it is, but it has another token: that of its user.
        with pytest.raises(WorkerError, match=r"asks for another token.*anabranch\.token"):
            api.post("/workers", {"address": stranger["address"]})
        command = [sys.executable, "-m", "anabranch", "worker", "--id", "guessing", "--join", query.url]
        environment = {**os.environ, "ANABRANCH_TOKEN": "guess"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        assert done.returncode == 1
        assert "The job refuses this worker: The token is wrong." in done.stderr
        assert query.token not in done.stderr + done.stdout
        live.run()
        live.assert_exact()
        assert [worker["id"] for worker in query.workers()] == ["worker-1"]


def test_a_query_with_tls_moves_state_takes_guests_and_lets_no_stranger_in(
    live: LiveQuery, ours: Authority, tmp_path: Path
) -> None:
    credentials = ours.credentials("")
    theirs = Authority.make(tmp_path / "foreign", "theirs")
    with live.running(workers=1, **files_of(credentials)) as query:
        assert query.url.startswith("https://")
        live.run(2)
        place = query.url.removeprefix("https://")
        with worker_process("--id", "guest", "--join", place, *options_of(credentials)) as (_, ready):
            assert ready["worker"] == "guest"
            with live.flowing():
                live.pass_epochs()
                assert query.rescale(workers=3).wait(WAIT_S)
            assert {worker["id"] for worker in query.workers()} >= {"guest", "worker-1"}
            live.assert_exact()
            for certificate in (theirs.sign(), ours.sign("old", days=-1), ("", "")):
                wrong = Credentials(query.token, *certificate, ours.path)
                environment = {**os.environ, "ANABRANCH_TOKEN": query.token}
                command = [sys.executable, "-m", "anabranch", "worker", "--join", query.url, *options_of(wrong)]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=120, env=environment, check=False
                )
                assert done.returncode == 1
                assert "certificate" in done.stderr
                assert query.token not in done.stderr + done.stdout
            live.run()
            live.assert_exact()
            assert query.rescale(workers=1).wait(WAIT_S)
        live.run()
        live.assert_exact()


@pytest.mark.parametrize("fault", ["a foreign certificate", "a key that does not fit", "no certificate", "no file"])
def test_a_query_with_files_that_do_not_fit_does_not_start(
    live: LiveQuery, ours: Authority, tmp_path: Path, fault: str
) -> None:
    good = ours.credentials("")
    certificate, key = {
        "a foreign certificate": Authority.make(tmp_path, "theirs").sign(),
        "a key that does not fit": (good.certificate, ours.sign("other")[1]),
        "no certificate": ("", ""),
        "no file": (str(tmp_path / "absent"), good.key),
    }[fault]
    with pytest.raises(SettingsError, match=r"anabranch\.tls"):
        live.running(workers=1, **files_of(Credentials("", certificate, key, ours.path))).__enter__()


PROGRAM = """
import json, sys, urllib.request
import anabranch
from pyspark.sql import SparkSession, functions as F
spark = (SparkSession.builder.master("local[1]").config("spark.ui.port", "0").config("spark.driver.memory", "1g")
         .config("spark.anabranch.redisPassword", "geheim-in-conf").config("spark.eventLog.enabled", "true")
         .config("spark.eventLog.dir", "file://" + sys.argv[1]).config("spark.log.level", "INFO")
         .config("spark.anabranch.controlPort", "0").config("spark.anabranch.workers", "1").getOrCreate())
spark.conf.set("spark.anabranch.token", "geheim-in-session")
rows = spark.readStream.format("rate").load().withColumn("k", F.col("value") % 3)
query = (anabranch.stream(rows).groupBy("k").count().writeStream.outputMode("update").format("noop")
         .option("anabranch.token", "geheim-in-option").trigger(once=True).start())
assert query.token == "geheim-in-option", query.token
query.awaitTermination(120)
query.explain(True)
print(query.settings, query.lastProgress, query.status)
base = spark.sparkContext.uiWebUrl
api = base + "/api/v1/applications/" + spark.sparkContext.applicationId
for page in ["/environment/", "/SQL/", "/StreamingQuery/", "/jobs/", "/stages/"]:
    print(urllib.request.urlopen(base + page).read().decode())
for number in range(3):
    for path in (f"{base}/SQL/execution/?id={number}", f"{api}/sql/{number}", f"{api}/jobs/{number}"):
        try:
            print(urllib.request.urlopen(path).read().decode())
        except OSError:
            pass
print(urllib.request.urlopen(api + "/environment").read().decode())
print("the end")
spark.stop()
"""


def test_no_secret_is_shown_by_sparks_pages_logs_and_plans(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "events")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path, check=False
    )
    assert done.stdout.endswith("the end\n"), done.stderr[-3000:]
    assert "spark.anabranch.redisPassword" in done.stdout
    written = [path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file()]
    assert written
    for text in [done.stdout, done.stderr, *(content.decode(errors="replace") for content in written)]:
        at = text.find("geheim-")
        assert at < 0, text[max(0, at - 300) : at + 100]
    assert "command line of process" in done.stderr
