"""Plays a scenario: runs its drivers one after the other, lets the faults happen, and judges what is left."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import threading
import time
import urllib.request
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import psutil
from pyspark.sql import SparkSession

from anabranch.wire import keyring
from soak import crashpoints, failingstorage
from soak.driver import FAILED
from soak.jobs import JOBS, MODELS, Expected, epochs_of, epochs_taken
from soak.places import Places
from soak.processes import Driver, Processes, is_alive, send, wait_until
from soak.reference import undisturbed
from soak.scenarios import ENDS_DRIVER, Fault, Kind, Scenario
from soak.timed import times_logged
from soak.verdict import Verdict, judge

_LOOK_INTERVAL_S = 0.02
#: How long a scenario may stand still before it counts as hung: a start on a busy machine takes long.
_STILL_MAX_S = 180.0
_STARTS_MAX = 20
#: Within this time, what belongs to a driver that is gone has to be gone as well.
_LEFT_MAX_S = 30.0
_HICCUP_S = 0.7
_ANSWER_S = 5.0
#: What Spark says of a source whose process was killed, later on or while it started.
_SOURCE_GONE = ("source", "failed to connect back")


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario."""

    scenario: Scenario
    verdict: Verdict
    faults: Counter[Kind]
    drivers: int
    epochs: int
    #: How often which operation of the storage failed.
    storage_errors: Counter[str]
    #: How often the query ended because of that.
    storage_ends: int
    #: Queries that ended by themselves: the errors of those that no fault had ended.
    errors: tuple[str, ...]
    #: What drivers that had been replaced said in the end.
    fenced: tuple[str, ...]
    duration_s: float

    @property
    def is_right(self) -> bool:
        return self.verdict.is_right


def expected_of(spark: SparkSession, scenario: Scenario, places: Places) -> Expected:
    """What an undisturbed run gives, with the epochs that the disturbed one had."""
    job, files = JOBS[scenario.job], scenario.input()
    epochs = epochs_taken(files, places.checkpoint, scenario.files_per_epoch)
    if job.timed is not None:
        # An epoch that was planned and never run comes after all timers, so nothing is due in it.
        return Expected(*job.timed(list(zip(times_logged(places.checkpoint), epochs, strict=True))))
    # An epoch without rows, at the end, changes nothing; after others it would change which rows are late.
    while epochs and not epochs[-1]:
        epochs.pop()
    if job.model is not None:
        return job.model(epochs)
    return undisturbed(spark, job, epochs, places.reference)


def modelled(scenario: Scenario) -> Expected:
    """What the model of its job says, if no driver ends on the way."""
    return MODELS[scenario.job](epochs_of(scenario.input(), scenario.files_per_epoch))


def play(spark: SparkSession, scenario: Scenario, places: Places) -> Outcome:
    """Run a scenario to its end."""
    places.write_input(scenario.input())
    run = _Run(scenario, places)
    try:
        findings = run.until_finished()
        findings += run.leftovers()
    finally:
        run.processes.end()
    if places.state.exists():
        verdict = judge(spark, places, expected_of(spark, scenario, places))
        findings += verdict.findings
    else:
        verdict = Verdict(0, 0, 0, 0, ())
    return Outcome(
        scenario=scenario,
        verdict=Verdict(verdict.rows, verdict.lost, verdict.doubled, verdict.wrong, tuple(findings)),
        faults=run.faults,
        drivers=run.drivers,
        epochs=places.committed_epochs(),
        storage_errors=failingstorage.errors_of(places.storage),
        storage_ends=run.storage_ends,
        errors=tuple(run.errors),
        fenced=tuple(run.fenced),
        duration_s=time.monotonic() - run.started_s,
    )


def clear(places: Places) -> None:
    shutil.rmtree(places.root, ignore_errors=True)


class _Run:
    """One scenario while it is played, in one thread."""

    def __init__(self, scenario: Scenario, places: Places) -> None:
        self._scenario = scenario
        self._places = places
        self.processes = Processes(places)
        self.started_s = time.monotonic()
        self.faults: Counter[Kind] = Counter()
        self.drivers = 0
        self.storage_ends = 0
        self.errors: list[str] = []
        self.fenced: list[str] = []
        self._left: deque[Fault] = deque(scenario.faults)
        self._crashes: deque[str] = deque(scenario.crashes)
        #: Processes that stand still, and when they go on; None: when the next driver is ready.
        self._frozen: list[tuple[float | None, list[psutil.Process]]] = []
        self._replaced: list[Driver] = []
        #: Workers of their own, by their ids: what they said about themselves.
        self._apart: dict[str, dict[str, Any]] = {}
        #: Those that the driver has lost since it started, or is about to lose.
        self._out: set[str] = set()
        #: Those that were told to stop.
        self._told: set[str] = set()
        #: Workers that joined by themselves: their pids.
        self._guests: list[int] = []
        self._guest_numbers = itertools.count(1)
        #: Whether Spark has to end the query of this driver.
        self._is_source_killed = False
        self._last_fault_s = self._ready_s = time.monotonic()
        self._moved: tuple[float, int, int] = (time.monotonic(), 0, 0)
        if scenario.store == "redis":
            self.processes.start_redis()
        if scenario.storage_fails:
            self.processes.let_storage_fail()
        self._driver = self._start()

    def until_finished(self) -> list[str]:
        """What went wrong on the way; nothing if the query has taken all of its input."""
        pause = threading.Event()
        while not pause.wait(_LOOK_INTERVAL_S):
            self._thaw()
            code = self._driver.ended()
            if code == 0:
                return self._end_of_replaced()
            if code is not None:
                self._note_end(self._driver, code)
                if self.drivers >= _STARTS_MAX:
                    return [f"the query did not finish in {self.drivers} starts: {self.errors[-1:]}"]
                self._driver = self._start()
            elif self._is_due():
                self._inject(self._left.popleft())
            elif self._stands_still():
                return [f"the query stands still since {_STILL_MAX_S:g} s after {self._moved[1]} epochs"]
        return []

    def leftovers(self) -> list[str]:
        """Processes that ought to be gone."""
        apart = {*self._guests, *(worker["pid"] for worker in self._apart.values())}

        def left() -> list[psutil.Process]:
            return [process for process in self.processes.left() if process.pid not in apart]

        if wait_until(lambda: not left(), _LEFT_MAX_S):
            return []
        return [f"processes are left behind: {[process.name() for process in left() if is_alive(process)]}"]

    # ------------------------------------------------------------------------------------------------ drivers

    def _start(self) -> Driver:
        scenario = self._scenario
        options: dict[str, Any] = {"workerTimeout": scenario.worker_timeout_s, "heartbeat": 0.5, "requestTimeout": 30}
        options |= {"store": scenario.store, "migration": scenario.migration}
        options["checkpointInterval"] = scenario.checkpoint_interval_s
        if self.processes.redis_url:
            options["redisUrl"] = self.processes.redis_url
        if scenario.apart:
            self._revive_workers()
            options["workerAddresses"] = ",".join(worker["address"] for worker in self._apart.values())
        else:
            options["workers"] = scenario.workers
        arguments = ["--job", scenario.job, "--files-per-epoch", str(scenario.files_per_epoch)]
        for name, value in options.items():
            arguments += ["--option", f"anabranch.{name}={value}"]
        self.drivers += 1
        self._ready_s = 0.0
        self._is_source_killed = False
        return self.processes.start_driver(arguments, crash=self._crashes[0] if self._crashes else None)

    def _note_end(self, driver: Driver, code: int) -> None:
        if code == crashpoints.EXIT_CODE:
            self.faults[Kind.CRASH] += 1
            self._crashes.popleft()
        elif code == FAILED:
            error = driver.error() or {"kind": "unknown", "message": ""}
            if self._is_source_killed and any(words in error["message"] for words in _SOURCE_GONE):
                return
            if failingstorage.REASON in error["message"]:
                self.storage_ends += 1
                return
            self.errors.append(f"{error['kind']}: {error['message'][:600]}")
        elif code != -signal.SIGKILL:
            self.errors.append(f"the driver ended with {code}; see {self._places.log}")

    def _end_of_replaced(self) -> list[str]:
        """Drivers that have been replaced have to notice it, and stop."""
        while self._frozen:
            for _, processes in self._frozen:
                _resume(processes)
            self._frozen = []
        findings = []
        for driver in self._replaced:
            if not driver.has_ended(within_s=_STILL_MAX_S):
                findings.append("a driver that was replaced goes on for ever")
            error = driver.error()
            self.fenced.append(error["kind"] if error else f"exit {driver.ended()}")
        return findings

    def _revive_workers(self) -> None:
        """Workers of their own are back when the next driver starts, with what they still know."""
        self._out.clear()
        for number in range(self._scenario.workers):
            name = f"apart-{number}"
            known = self._apart.get(name)
            if known is not None and psutil.pid_exists(known["pid"]) and is_alive(psutil.Process(known["pid"])):
                worker = psutil.Process(known["pid"])
                _resume([worker])
                if name not in self._told:
                    continue
                # It would leave as soon as it can.
                send(worker, signal.SIGKILL)
                wait_until(lambda worker=worker: not is_alive(worker), _LEFT_MAX_S)  # type: ignore[misc]
            port = int(known["address"].rpartition(":")[2]) if known else 0
            self._apart[name] = self.processes.start_worker(name, self._scenario.store, port=port)
        self._told.clear()

    # ------------------------------------------------------------------------------------------------- faults

    def _is_due(self) -> bool:
        if not self._left:
            return False
        if self._driver.is_ready and not self._ready_s:
            self._ready_s = time.monotonic()
        fault = self._left[0]
        if not self._ready_s and not fault.early:
            return False
        return time.monotonic() - max(self._last_fault_s, self._ready_s) >= fault.after_s

    def _inject(self, fault: Fault) -> None:
        choice = random.Random(fault.choice)
        for kind in sorted(fault.kinds, key=lambda kind: kind in ENDS_DRIVER):
            if self._carry_out(kind, fault, choice):
                self.faults[kind] += 1
        self._last_fault_s = time.monotonic()

    def _carry_out(self, kind: Kind, fault: Fault, choice: random.Random) -> bool:
        match kind:
            case Kind.WORKER | Kind.FREEZE | Kind.HICCUP | Kind.LEAVE:
                return self._disturb_worker(kind, fault, choice)
            case Kind.RESCALE:
                return self._rescale(choice)
            case Kind.JOIN:
                return self._join()
            case Kind.STORAGE:
                window = self._places.storage
                failingstorage.let_fail(window, for_s=fault.failing_s, rate=fault.rate, seed=fault.choice)
            case Kind.FORK_SERVER:
                return any(send(fork_server, signal.SIGKILL) for fork_server in self._driver.nurseries())
            case Kind.TASK:
                tasks = self._driver.task_processes()
                return bool(tasks) and send(choice.choice(tasks), signal.SIGKILL)
            case Kind.SOURCE:
                self._is_source_killed = any(send(each, signal.SIGKILL) for each in self._driver.source_processes())
                return self._is_source_killed
            case Kind.DRIVER:
                self._driver.process.kill()
            case Kind.MACHINE:
                for process in self._driver.family():
                    send(process, signal.SIGKILL)
            case Kind.ZOMBIE:
                family = self._driver.family()
                for process in family:
                    send(process, signal.SIGSTOP)
                self._frozen.append((None, family))
                self._replaced.append(self._driver)
                self._driver = self._start()
        return True

    def _disturb_worker(self, kind: Kind, fault: Fault, choice: random.Random) -> bool:
        victim = self._choose_worker(choice, for_good=kind is not Kind.HICCUP)
        if victim is None:
            return False
        if kind is Kind.WORKER:
            # It must not be taken for one that lives, if the next driver starts right away.
            return send(victim, signal.SIGKILL) and wait_until(lambda: not is_alive(victim), _LEFT_MAX_S)
        if kind is Kind.LEAVE:
            self._told |= {name for name, worker in self._apart.items() if worker["pid"] == victim.pid}
            return send(victim, signal.SIGTERM)
        pause_s = fault.pause_s if kind is Kind.FREEZE else _HICCUP_S
        self._frozen.append((time.monotonic() + pause_s, [victim]))
        return send(victim, signal.SIGSTOP)

    def _rescale(self, choice: random.Random) -> bool:
        """Ask for another number of workers, or another parallelism; False if nobody hears it."""
        wanted: dict[str, Any] = {}
        # Of workers of their own, no driver can start any: those that it let go would be missing.
        if not self._scenario.apart and choice.random() < 0.8:
            wanted["workers"] = choice.randint(1, 4)
        if not wanted or choice.random() < 0.4:
            wanted["parallelism"] = choice.randint(1, 5)
        return self._driver.is_ready and ask(self._places.url_of(self._driver.pid), "/rescale", wanted)

    def _join(self) -> bool:
        if not self._driver.is_ready:
            return False
        name = f"guest-{next(self._guest_numbers)}"
        url = self._places.url_of(self._driver.pid)
        self._guests.append(self.processes.start_worker(name, self._scenario.store, join=url)["pid"])
        return True

    def _choose_worker(self, choice: random.Random, *, for_good: bool) -> psutil.Process | None:
        if not self._scenario.apart:
            guests = [psutil.Process(pid) for pid in self._guests if psutil.pid_exists(pid)]
            workers = [*self._driver.workers(), *filter(is_alive, guests)]
            return choice.choice(workers) if workers else None
        # No driver can replace these: one is left until the next driver starts.
        names = sorted(set(self._apart) - self._out)
        if len(names) < 2 or not psutil.pid_exists(self._apart[name := choice.choice(names)]["pid"]):
            return None
        if for_good:
            self._out.add(name)
        return psutil.Process(self._apart[name]["pid"])

    def _thaw(self) -> None:
        now_s = time.monotonic()
        is_new_ready = self._driver.is_ready
        waiting = []
        for until_s, processes in self._frozen:
            if is_new_ready if until_s is None else now_s >= until_s:
                _resume(processes)
            else:
                waiting.append((until_s, processes))
        self._frozen = waiting

    def _stands_still(self) -> bool:
        since_s, epochs, drivers = self._moved
        if (epochs, drivers) != (self._places.committed_epochs(), self.drivers):
            self._moved = time.monotonic(), self._places.committed_epochs(), self.drivers
            return False
        return time.monotonic() - since_s > _STILL_MAX_S


def ask(url: str, path: str, body: dict[str, Any]) -> bool:
    """Whether the driver there does what it is asked."""
    if (job := keyring.find(url)) is None:
        return False
    headers = {"content-type": "application/json", "authorization": f"Bearer {job.credentials.token}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            return True
    except OSError:
        return False


def _resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        send(process, signal.SIGCONT)
