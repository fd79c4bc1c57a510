"""The word of an operator: the record in each store, under contention, and the commands."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import tomllib
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from service import report
from states import Bare, Job, Tens, made_of_one_batch
from typer.main import get_command
from typer.testing import CliRunner

from mapstate.cli.commands import app
from mapstate.errors import CorruptRecordError, NotAliveError, UsageError
from mapstate.operations import control
from mapstate.operations.control import Control, list_topologies
from mapstate.operations.states import list_states, state_names
from mapstate.protocol import control as rules
from mapstate.protocol.control import ControlRecord, DriverRecord
from mapstate.protocol.ledger_record import now
from mapstate.schema import Field, KeyField
from mapstate.spark.driver.state import encode_report

ROOT = Path(__file__).resolve().parents[2]
AT = "2026-11-24T10:00:00.000+00:00"


@pytest.fixture(
    params=[
        *("memory", "sqlite"),
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("cluster", marks=pytest.mark.redis),
    ]
)
def url(request: Any, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param in ("redis", "cluster"):
        return str(request.getfixturevalue("redis_url" if request.param == "redis" else "cluster_url"))
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"sqlite:///{tmp_path}/state.db"


def submitted(
    url: Any, name: str = "site", states: tuple[str, ...] = ("s",), silence: float = 3600.0, **changes: Any
) -> ControlRecord:
    """A topology whose driver says nothing; not for long enough to be dead."""
    driver = DriverRecord(session=name, host="here", pid=7, started=AT, at=AT, silence=silence)
    with Control(url, name) as own:
        made = own.change(lambda record: rules.submit(record, name, driver, states, active=True, at=AT))
        return own.change(lambda record: msgspec.structs.replace(made, **changes)) if changes else made


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, done.stderr


def test_a_record_is_kept_by_each_store(url):
    """Beside states, whose listing leaves it out."""
    assert list_topologies(url) == []
    Job(url).batch(a=1)
    submitted(url)
    submitted(url, "a")
    assert [one.name for one in list_topologies(url)] == ["a", "site"]
    assert [one.name for one in list_states(url)] == ["s"]
    assert [name for page in state_names(url) for name in page] == ["s"]
    assert not control.deactivate(url, "site", timeout=0).is_obeyed
    with Control(url, "site") as own:
        own.change(lambda record: rules.obey(record, "site", "site", 1))
        own.change(lambda record: rules.release(record, "site", "site"))
    assert control.kill(url, "site").is_obeyed
    assert [one.name for one in list_topologies(url)] == ["a"]
    with pytest.raises(NotAliveError):
        control.activate(url, "site")


def test_a_store_with_get_and_put_keeps_it_too():
    bare = Bare("multi_get", "multi_put")
    submitted(bare)
    assert control.topology(bare, "site").status == "ACTIVE"
    with pytest.raises(UsageError, match="ListsStates"):
        list_topologies(bare)


def test_of_many_at_once_each_word_is_written(url):
    """Beats and commands meet, and no command takes the number of another one."""
    submitted(url)
    words, beats, workers = 10, 20, 4
    numbers: list[int] = []

    def order(at: int) -> None:
        with Control(url, "site") as own:
            for turn in range(words):
                partitions = 1 + at * words + turn
                numbers.append(own.change(lambda record, n=partitions: rules.rebalance(record, "site", n)).command)

    def live() -> None:
        with Control(url, "site") as own:
            for _ in range(beats):
                own.change(lambda record: rules.beat(record, "site", "site", now()))

    threads = [threading.Thread(target=order, args=(at,)) for at in range(workers)] + [threading.Thread(target=live)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = control.topology(url, "site")
    assert sorted(numbers) == list(range(1, workers * words + 1))
    assert record.driver is not None
    assert (record.command, record.driver.beat) == (workers * words, beats)
    assert record.revision == 1 + workers * words + beats


def test_a_state_of_that_name_is_no_topology(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    made_of_one_batch(url, "site.control", (KeyField("k", "string"),), (Field("n", "Count", "bigint"),), {"a": 1})
    with pytest.raises(CorruptRecordError, match="a state has this name"):
        control.activate(url, "site")
    assert list_topologies(url) == []


def test_the_commands(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    assert run("list", url) == (0, "topology\tstatus\tdriver\tuptime\tlast beat\tstates\n0 topologies\n", "")
    code, _, error = run("kill", url, "site")
    assert code == 2
    assert "NotAliveError" in error
    submitted(url, driver=None)
    assert run("deactivate", url, "site")[:2] == (
        0,
        "site is INACTIVE, and no driver runs it: the next one that starts obeys.\n",
    )
    assert run("rebalance", url, "site", "-n", "7")[0] == 0
    assert run("rebalance", url, "site", "-n", "100001")[0] == 2
    code, listed, _ = run("list", url)
    assert listed.splitlines()[1] == "site\tINACTIVE\tnone\t\t\ts"
    (found,) = json.loads(run("list", url, "--json")[1])
    assert (found["topology"], found["record"]["partitions"], found["problem"]) == ("site", 7, None)
    code, printed, _ = run("kill", url, "site", "--json")
    fields = {"status": "REMOVED", "partitions": None, "is_obeyed": True, "is_superseded": False}
    assert json.loads(printed) == {"topology": "site", **fields}


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/state.db"
    monkeypatch.setattr(control.deactivate, "__kwdefaults__", {"timeout": 0.0})
    submitted(url)
    code, printed, error = run("deactivate", url, "site")
    assert (code, printed) == (1, "")
    assert "not obeyed" in error
    assert "process 7" in error
    assert control.topology(url, "site").status == "INACTIVE"
    line = run("list", url)[1].splitlines()[1].split("\t")
    assert (line[:3], line[5]) == (["site", "INACTIVE", "here, process 7"], "s")


@pytest.mark.parametrize(
    ("words", "later", "says"),
    [
        (["deactivate"], lambda one: rules.activate(one, "site", AT), "site is ACTIVE\n"),
        (["deactivate"], lambda one: rules.kill(one, "site", 0, AT), "site is KILLED\n"),
        (["rebalance", "-n", "7"], lambda one: rules.rebalance(one, "site", 5), "site is ACTIVE, 5 partitions\n"),
    ],
    ids=["activate", "kill", "rebalance"],
)
def test_a_command_whose_place_another_took_is_superseded(words, later, says, tmp_path, monkeypatch):
    """Also where the driver obeys the later one before this one looks."""
    url = f"sqlite:///{tmp_path}/state.db"
    for obeys in (False, True):
        submitted(url)

        def change(_: float, obeys: bool = obeys) -> None:
            with Control(url, "site") as own:
                number = own.change(later).command
                if obeys:
                    own.change(lambda record: rules.obey(record, "site", "site", number))

        monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=time.monotonic, sleep=change))
        code, printed, error = run(*words[:1], url, "site", *words[1:])
        assert (code, printed) == (1, "")
        assert f"superseded by a later command: {says}" in error
        with Control(url, "site") as own:
            own.change(lambda record: rules.release(record, "site", "site"))
            own.change(lambda record: rules.kill(record, "site", 0, AT))


def test_a_driver_that_ends_without_obeying_leaves_the_removal_to_the_command(tmp_path, monkeypatch):
    """As one whose Spark has gone."""
    url = f"sqlite:///{tmp_path}/state.db"
    submitted(url)

    def release(_: float) -> None:
        with Control(url, "site") as own:
            own.change(lambda record: rules.release(record, "site", "site"))

    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=time.monotonic, sleep=release))
    assert run("kill", url, "site") == (0, "site is REMOVED\n", "")


def test_a_store_that_does_not_answer_makes_no_driver_dead(tmp_path, monkeypatch):
    """What a look takes does not count: the driver could not beat either."""
    url = f"sqlite:///{tmp_path}/state.db"
    submitted(url, silence=10.0)
    clock = [0.0]
    read = Control.read

    def slow(own: Control) -> ControlRecord | None:
        clock[0] += 20
        return read(own)

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(Control, "read", slow)
    code, _, error = run("kill", "--wait", "300", url, "site")
    assert (code, "not obeyed" in error) == (1, True)
    monkeypatch.setattr(Control, "read", read)
    code, printed, error = run("kill", url, "site")
    assert (code, printed) == (0, "site is REMOVED\n")
    assert "site's driver on here, process 7, is dead" in error
    submitted(url, silence=10.0)
    code, printed, error = run("deactivate", url, "site")
    assert (code, printed) == (0, "site is INACTIVE, and no driver runs it: the next one that starts obeys.\n")
    assert "is dead" in error
    assert control.topology(url, "site").driver is None


def test_a_dead_driver_is_listed_as_dead_and_one_whose_clock_is_wrong_is_not(tmp_path, monkeypatch):
    """By its beats: the last one of both is three days old, by this machine's clock."""
    url = f"sqlite:///{tmp_path}/state.db"
    Job(url).batch(a=1)
    for name in ("alive", "dead"):
        submitted(url, name, silence=10.0)

    def sleep(_: float) -> None:
        with Control(url, "alive") as own:
            own.change(lambda record: rules.beat(record, "alive", "alive", AT))

    for module in ("mapstate.operations.control", "mapstate.cli.topologies"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert [line.split("\t")[:2] for line in run("list", url)[1].splitlines()[1:3]] == [
        ["alive", "ACTIVE"],
        ["dead", "DEAD"],
    ]
    assert [one["is_dead"] for one in json.loads(run("list", url, "--json")[1])] == [False, True]
    for name, words in (("alive", ["ACTIVE"] * 3), ("dead", ["ACTIVE", "ACTIVE", "DEAD"])):
        lines = run("monitor", url, name, "-i", "4", "--count", "3", "--json")[1].splitlines()
        assert [json.loads(line)["status"] for line in lines] == words


def test_several_are_killed_in_one_command(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    for name in ("a", "c"):
        submitted(url, name, driver=None)
    code, printed, error = run("kill", url, "a", "b", "c")
    assert (code, printed) == (2, "a is REMOVED\n")
    code, printed, error = run("kill", "-i", url, "b", "c")
    assert (code, printed) == (2, "c is REMOVED\n")
    assert "'b'" in error
    assert run("kill", url)[0] == 2


def test_a_record_that_cannot_be_read_spoils_no_listing(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    submitted(url)
    with Control(url, "odd") as own:
        own.change(lambda _: msgspec.structs.replace(control.topology(url, "site"), topology="odd\x1b", control=9))
    code, printed, error = run("list", url)
    assert code == 1
    assert "odd\tcannot be read" in printed
    assert "site\tACTIVE" in printed
    assert "\x1b" not in printed + error


def test_monitor_counts_what_came_in_since_the_line_before(tmp_path, monkeypatch):
    """Of states in another store it knows nothing."""
    url = f"sqlite:///{tmp_path}/state.db"
    job, tens = Job(url), Tens(url, "tens")
    job.batch(a=1)
    tens.batch({15: {"a": 1}}, watermark=15)
    submitted(url, states=("s", "tens", "elsewhere"))

    batches = itertools.count()

    def work(_: float) -> None:
        """A batch of both, and its reports."""
        batch_id = next(batches)
        job.store.keep_report(encode_report(report(batch_id, rows=1_000_000)), 100)
        tens.store.keep_report(encode_report(report(batch_id, watermark=27, rows_late=3)), 100)

    work(0)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=work)
    monkeypatch.setattr("mapstate.cli.topologies.time", clock)
    code, printed, _ = run("monitor", url, "site", "--count", "2", "--json")
    assert code == 0
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["state"], line["batches"], line["watermark"]) for line in lines[:3]] == [
        ("s", 1, None),
        ("tens", 1, "27"),
        ("elsewhere", None, None),
    ]
    assert (lines[3]["batch_id"], lines[0]["batch_id"]) == (2, 1)
    assert lines[0]["rows_per_second"] > 0
    assert (lines[1]["rows_late"], lines[1]["milliseconds"]) == (3, 250)
    text = run("monitor", url, "site", "--count", "1")[1].splitlines()
    assert text[0].split("\t")[:3] == ["time", "status", "state"]
    assert text[3].split("\t")[2:] == ["elsewhere", *["-"] * 7]


# The examples of supervisors


def test_the_unit_starts_the_job_again_after_a_failure_only():
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "examples" / "deploy" / "site.service")
    service = unit["Service"]
    assert (service["Restart"], service["KillMode"]) == ("on-failure", "control-group")
    _, caught = (ROOT / "examples" / "site_job.py").read_text().split("    except NotAliveError as error:\n")
    assert f"sys.exit({service['RestartPreventExitStatus']})" in caught
    assert Path(service["ExecStart"].split()[3]).name in {path.name for path in (ROOT / "examples").iterdir()}
    assert int(service["RestartSec"]) * int(unit["Unit"]["StartLimitBurst"]) < int(
        unit["Unit"]["StartLimitIntervalSec"]
    )


def test_the_application_of_the_operator_does_the_same():
    (found,) = yaml.safe_load_all((ROOT / "examples" / "deploy" / "site.yaml").read_text())
    spec = found["spec"]
    assert (found["kind"], spec["type"], spec["mode"]) == ("SparkApplication", "Python", "cluster")
    assert spec["restartPolicy"]["type"] == "OnFailure"
    assert Path(spec["mainApplicationFile"]).name in {path.name for path in (ROOT / "examples").iterdir()}
    for part in ("driver", "executor"):
        assert list(spec[part]["envSecretKeyRefs"]) == ["MAPSTATE_URL"]
    source = (ROOT / "examples" / "site_job.py").read_text()
    assert f"sys.argv[{len(spec['arguments'])}]" in source
    assert "MAPSTATE_URL" in source


def test_the_deployment_of_the_service_calls_it_as_it_is():
    deployment, service = yaml.safe_load_all((ROOT / "examples" / "deploy" / "serve.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command = get_command(app).commands[container["args"][0]]
    context = command.make_context("serve", container["args"][1:])
    assert (context.params["host"], context.params["port"]) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert context.params["token_env"] in {one["name"] for one in container["env"]}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[probe]["httpGet"]["path"] == path
    assert container["readinessProbe"]["timeoutSeconds"] > 3  # as long as /ready may take


def test_the_extras_that_the_manifests_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("site.yaml", "serve.yaml"):
        for named in re.findall(r"mapstate\[([\w,]+)\]", (ROOT / "examples" / "deploy" / name).read_text()):
            assert set(named.split(",")) <= set(extras)


@pytest.mark.parametrize("number", [True, 2.0, 2.5])
def test_what_no_record_can_hold_is_refused_and_the_record_can_be_read(number, url):
    """It was written, and then no word reached the topology any more."""
    submitted(url)
    with pytest.raises(UsageError, match="partitions is an int"):
        control.rebalance(url, "site", partitions=number, timeout=0)
    if number is True:
        with pytest.raises(UsageError, match="a kill waits for"):
            control.kill(url, "site", wait=number, timeout=0)
    assert control.topology(url, "site").command == 0
