"""Every path of a checkpoint, relative to Spark's checkpoint directory, and the way back from names to numbers.

<checkpoint>/
  offsets/12  commits/12  …                      Spark's own
  anabranch/
    job.json                                     what the job is; written first, never changed
    generations/00000003.json                    which driver claimed which generation
    shapes/00000003.json                         the stages from generation 3 on, if they differ from job.json
    routes/00000007.json                         which worker owned which key group
    manifests/000000000012.g00000003.json        what epoch 12 is made of, as generation 3 wrote it
    changes/stage2/count/epoch=000000000012/g00000003-r<run>-<worker>.parquet
    sinks/<path>.json                            which number epochs have in the log of a file sink
    snapshots/000000000012.json                  the whole state as of epoch 12: the list of its files
    snapshots/stage2/count/epoch=000000000012/<unique>.parquet
"""

from __future__ import annotations

import re
from urllib.parse import quote

import xxhash

from anabranch.core.ids import Epoch, Generation, RouteVersion, Run, WorkerId

SPARK_COMMITS = "commits"
SPARK_OFFSETS = "offsets"
SPARK_METADATA = "metadata"
#: What Spark's sources remember, such as the files that they have read.
SPARK_SOURCES = "sources"

#: In a savepoint: written last.
SAVEPOINT = "savepoint.json"

#: Everything of Anabranch; what else is in the checkpoint is Spark's.
ROOT = "anabranch"
JOB = "anabranch/job.json"
GENERATIONS = "anabranch/generations"
ROUTES = "anabranch/routes"
MANIFESTS = "anabranch/manifests"
CHANGES = "anabranch/changes"
#: Offsets of epochs that Spark is to run again, beside Spark's own.
REPLAY = "anabranch/replay"
#: What the stages looked like from a generation on, where they differ from those of job.json.
SHAPES = "anabranch/shapes"
SINKS = "anabranch/sinks"
SNAPSHOTS = "anabranch/snapshots"

_NUMBER = re.compile(r"(\d+)")
_NUMBERED_FILE = re.compile(r"(\d{8})\.json")
_MANIFEST_FILE = re.compile(r"(\d{12})\.g(\d{8})\.json")
_CHANGE_FILE = re.compile(rf"{CHANGES}/[^/]+/[^/]+/epoch=(\d{{12}})/g(\d{{8}})-[^/]+\.parquet")
_SNAPSHOT_DOCUMENT = re.compile(r"(\d{12})\.json")

#: File systems allow 255 bytes for a name; what is left over is for suffixes and the names of temporary files.
_LONGEST_NAME = 120


def generation_file(generation: Generation) -> str:
    return f"{GENERATIONS}/{generation:08d}.json"


def shape_file(generation: Generation) -> str:
    return f"{SHAPES}/{generation:08d}.json"


def route_file(version: RouteVersion) -> str:
    return f"{ROUTES}/{version:08d}.json"


def sink_file(place: str) -> str:
    """What is known about the sink in a directory."""
    return f"{SINKS}/{safe_name(place)}.json"


def manifest_file(epoch: Epoch, generation: Generation) -> str:
    """The generation is part of the name, so that a driver that was replaced overwrites nothing of its successor."""
    return f"{MANIFESTS}/{epoch:012d}.g{generation:08d}.json"


def variable_folder(stage_name: str, variable: str) -> str:
    """Everything that ever happened to a state variable: the folder to point a query engine at."""
    return f"{CHANGES}/{safe_name(stage_name)}/{safe_name(variable)}"


def change_file(
    stage_name: str, variable: str, *, epoch: Epoch, generation: Generation, run: Run, worker: WorkerId
) -> str:
    """One worker's changes to one state variable in one run of an epoch."""
    folder = variable_folder(stage_name, variable)
    return f"{folder}/epoch={epoch:012d}/g{generation:08d}-r{run}-{safe_name(worker)}.parquet"


def snapshot_document(epoch: Epoch) -> str:
    """What lists the files of a snapshot; without it, they are none."""
    return f"{SNAPSHOTS}/{epoch:012d}.json"


def snapshot_file(stage_name: str, variable: str, *, epoch: Epoch, unique: str) -> str:
    """Rows of one state variable; ``unique`` keeps apart what was written for the same epoch more than once."""
    folder = f"{SNAPSHOTS}/{safe_name(stage_name)}/{safe_name(variable)}"
    return f"{folder}/epoch={epoch:012d}/{safe_name(unique)}.parquet"


def generation_of(name: str) -> Generation | None:
    """Returns the generation of a file of ``generations/`` or ``shapes/``; None if the file is something else."""
    match = _NUMBERED_FILE.fullmatch(name)
    return Generation(int(match[1])) if match else None


def route_version_of(name: str) -> RouteVersion | None:
    match = _NUMBERED_FILE.fullmatch(name)
    return RouteVersion(int(match[1])) if match else None


def manifest_of(name: str) -> tuple[Epoch, Generation] | None:
    match = _MANIFEST_FILE.fullmatch(name)
    return (Epoch(int(match[1])), Generation(int(match[2]))) if match else None


def change_file_of(path: str) -> tuple[Epoch, Generation] | None:
    """The epoch and the generation of a change file; None: the file is something else."""
    match = _CHANGE_FILE.fullmatch(path)
    return (Epoch(int(match[1])), Generation(int(match[2]))) if match else None


def snapshot_epoch_of(name: str) -> Epoch | None:
    match = _SNAPSHOT_DOCUMENT.fullmatch(name)
    return Epoch(int(match[1])) if match else None


def spark_batch_of(name: str) -> Epoch | None:
    """The batch that a file of Spark's ``commits/`` or ``offsets/`` stands for: Spark names them by their number."""
    return Epoch(int(name)) if _NUMBER.fullmatch(name) else None


def log_entry_of(name: str) -> int | None:
    """The number of an entry in the log of Spark's file source or file sink; some hold those before them as well."""
    name = name.removesuffix(".compact")
    return int(name) if _NUMBER.fullmatch(name) else None


def safe_name(name: str) -> str:
    """A name that every file system, shell pattern and Hive-style reader takes as one plain word.

    Letters, digits, ``_ - ~`` and inner dots stay as they are; everything else becomes ``%XX``. Different names stay
    different, though on some file systems only if they differ in more than case.
    """
    quoted = quote(name, safe="")
    if not quoted or quoted.startswith("."):
        # "." and ".." have a meaning, and names that begin with a dot are hidden.
        quoted = "%2E" + quoted[1:] if quoted else "%"
    if len(quoted) > _LONGEST_NAME:
        quoted = f"{quoted[: _LONGEST_NAME - 17]}~{xxhash.xxh3_64_hexdigest(name.encode())}"
    return quoted
