"""The command demo: one clear sentence for each mistake, before anything is started or overwritten."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.demo import session
from anabranch.demo.command import demo
from anabranch.demo.options import DemoOptions
from support.sentences import says


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(demo)
    return app


def invoke(app: typer.Typer, tmp_path: Path, options: list[str]) -> Result:
    # Without Java nothing can start, should an option that is wrong be taken.
    environment = {"JAVA_HOME": str(tmp_path / "nowhere")}
    return CliRunner().invoke(app, ["--output", str(tmp_path / "out"), *options], env=environment)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--seconds -1", "--seconds is -1 … between 1 and 86,400. Choose"),
        ("--rate 0", "--rate is 0 … between 0.1 and 1,000,000. Choose"),
        ("--rate nan", "--rate is nan … between 0.1 and 1,000,000. Choose"),
        ("--keys -5", "--keys is -5 … between 1 and 2,147,483,647. Choose"),
        ("--skew -0.5", "--skew is -0.5 … between 0 and 100. Choose"),
        ("--workers 0", "--workers is 0 … between 1 and 1,024. Choose"),
        ("--parallelism 0", "--parallelism is 0 … between 1 and 32,768. Choose"),
        ("--work-ms -1", "--work-ms is -1 … between 0 and 60,000. Choose"),
        ("--count-ms -1", "--count-ms is -1 … between 0 and 60,000. Choose"),
        (
            "--junk-bytes -1",
            "--junk-bytes is -1 … between 0 and 16,777,216. Choose",
        ),
        ("--store disk", "--store is 'disk' … Choose memory or rocksdb or redis"),
        (
            "--store rocksdb --redis-url redis://localhost:6379/0",
            "--redis-url … --store is rocksdb. Give --store redis",
        ),
        (
            "--migration slow",
            "--migration is 'slow' … Choose lazy or eager or restart",
        ),
        ("--rescale-to -1", "--rescale-to is -1 … between 0 and 1,024. Choose"),
        (
            "--workers 3 --rescale-to 3",
            "--rescale-to is 3, as many workers as … Choose another number, or 0",
        ),
        ("--rescale-at nan", "--rescale-at is nan … between 0 and 86,400. Choose"),
        (
            "--rescale-at 30",
            "--rescale-at is 30 … over after 30 seconds … earlier … more --seconds",
        ),
        (
            "--rescale-at 20 --compare",
            "--rescale-at is 20 … over after 20 seconds … earlier … more --seconds",
        ),
        (
            "--rescale-at 5 --rescale-to 0",
            "--rescale-at … --rescale-to is 0. Leave one of the two out",
        ),
        (
            "--compare --migration lazy",
            "--compare … every --migration … Leave one of the two out",
        ),
        (
            "--compare --rescale-to 0",
            "--compare … --rescale-to is 0. Leave one of the two out",
        ),
        (
            "--compare --no-drain",
            "--compare … --no-drain … lazy only. Leave it out",
        ),
        (
            "--no-drain --store redis",
            "--no-drain … --store redis. Leave it out, or choose --migration lazy and another --store",
        ),
        (
            "--no-drain --rescale-to 1",
            "--rescale-to is 1 … --no-drain no worker can leave. Choose a greater number, or leave --no-drain out",
        ),
        (
            "--trigger soon",
            "--trigger is 'soon' … Give something like '0 seconds', '500 milliseconds' or '1 minute'",
        ),
        (
            "--master nowhere",
            "--master is 'nowhere' … Give something like 'local[2]' or spark://host:7077",
        ),
        ("--input . --rate 5", "--rate … --input is given. Leave one of the two out"),
        ("--input . --skew 0", "--skew … --input is given. Leave one of the two out"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(
    app: typer.Typer, tmp_path: Path, options: str, sentence: str
) -> None:
    done = invoke(app, tmp_path, options.split())
    assert says(done.stderr, f"anabranch demo: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_missing_input_directory_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    done = invoke(app, tmp_path, ["--input", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "which is not a directory. Make event files with: anabranch workgen" in done.stderr


def test_a_missing_java_is_said_in_one_sentence_and_leaves_earlier_results_alone(
    app: typer.Typer, tmp_path: Path
) -> None:
    done = invoke(app, tmp_path, [])
    assert done.exit_code == 1
    assert done.stderr.startswith("anabranch demo: Java 17 or newer is needed, and there is none in JAVA_HOME")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_old_java_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    java = tmp_path / "nowhere" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    done = invoke(app, tmp_path, [])
    assert done.exit_code == 1
    assert "is Java 11. Install it" in done.stderr


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_missing_matplotlib_is_said_once_with_the_command_that_installs_it(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    def open_spark(*_: object, **__: object) -> None:
        raise AnabranchError("No Spark here.")

    monkeypatch.setattr(session, "check_java", lambda: None)
    monkeypatch.setattr(session, "open_spark", open_spark)
    if not is_installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke(app, tmp_path, [])
    sentence = "Pictures need matplotlib, which is not installed. Install it with: pip install 'anabranch[plots]'."
    assert done.stdout.splitlines().count(sentence) == (0 if is_installed else 1)
    assert done.stderr == "anabranch demo: No Spark here.\n"


def test_the_command_can_be_imported_without_spark() -> None:
    """State workers are started through the same command line, and must not pay for Spark."""
    program = "import sys; import anabranch.demo.command; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_the_time_of_a_trigger_is_understood() -> None:
    assert DemoOptions(trigger="500 milliseconds").trigger_s == 0.5
    assert DemoOptions(trigger="1 Minute").trigger_s == 60.0


def test_an_epoch_may_take_all_that_arrives_between_two_triggers() -> None:
    assert DemoOptions(rate=100).max_rows_per_epoch == 500
    assert DemoOptions(rate=100, trigger="1 minute").max_rows_per_epoch == 12_000


def test_a_run_is_rescaled_in_the_middle_to_twice_as_many_workers_unless_told_otherwise() -> None:
    options = DemoOptions(seconds=30, workers=3, parallelism=2)
    assert (options.workers_after, options.parallelism_after, options.rescale_at_s) == (6, 4, 15)
    options = DemoOptions(seconds=30, workers=4, parallelism=4, rescale_to=1, rescale_at=2)
    assert (options.workers_after, options.parallelism_after, options.rescale_at_s) == (1, 1, 2)
    assert DemoOptions(rescale_to=0).workers_after == 0
    assert DemoOptions(workers=1000).workers_after == 500


def test_a_run_is_bounded() -> None:
    assert DemoOptions(seconds=8).limit_s == 18
    assert DemoOptions(seconds=60).limit_s == 90
    assert DemoOptions(seconds=60, input=Path()).limit_s == 60
    with pytest.raises(SettingsError, match="--seconds"):
        DemoOptions(seconds=float("inf"))
