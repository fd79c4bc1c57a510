"""The images of `Dockerfile` and examples/deploy: what they say, and, where a Docker answers, that they do it.

`make images` runs all of it. The bases are those of the Dockerfiles, or images of your own:

    MAPSTATE_TEST_PYTHON_IMAGE=... MAPSTATE_TEST_SPARK_IMAGE=... make images
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import kubernetes_validate
import pytest
import yaml
from needed_servers import without_server
from typer.main import get_command

from mapstate.cli.commands import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def words_of(instruction: str) -> list[str]:
    """The JSON list of the last such instruction."""
    words: list[str] = json.loads(re.findall(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    return words


def test_the_image_calls_the_service_as_it_is():
    command = get_command(app).commands[words_of("CMD")[0]]
    asked = command.make_context("serve", words_of("CMD")[1:]).params
    assert words_of("ENTRYPOINT") == ["mapstate"]
    assert f"\nEXPOSE {asked['port']}\n" in DOCKERFILE
    assert f":{asked['port']}/health" in DOCKERFILE
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["serve"]
    assert asked["token_env"] in service["environment"]
    assert service["ports"] == [f"127.0.0.1:8080:{asked['port']}"]
    assert (DEPLOY / service["build"]).resolve() == ROOT


def test_the_bases_have_a_python_that_mapstate_runs_on():
    for text in (DOCKERFILE, (DEPLOY / "job.Dockerfile").read_text()):
        (minor,) = re.findall(r"^ARG PYTHON=python:3\.(\d+)-", text, re.MULTILINE)
        assert f'"Programming Language :: Python :: 3.{minor}"' in (ROOT / "pyproject.toml").read_text()


def test_the_job_has_the_spark_that_its_application_names():
    (version,) = re.findall(r"^ARG SPARK=spark:([\d.]+)-", (DEPLOY / "job.Dockerfile").read_text(), re.MULTILINE)
    assert yaml.safe_load((DEPLOY / "site.yaml").read_text())["spec"]["sparkVersion"] == version


def test_kubernetes_takes_the_manifests_of_the_service():
    for manifest in yaml.safe_load_all((DEPLOY / "serve.yaml").read_text()):
        kubernetes_validate.validate(manifest, "1.31", strict=True)
        del manifest["spec"]["selector"]
        if manifest["kind"] == "Deployment":
            with pytest.raises(kubernetes_validate.ValidationError, match="selector"):
                kubernetes_validate.validate(manifest, "1.31", strict=True)


# Built and run


def docker(*words: str, seconds: float = 900, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=seconds, check=False)
    assert not check or done.returncode == 0, f"docker {' '.join(words)}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done


def built(name: str, dockerfile: str, *bases: str) -> str:
    """The image, whose bases are there or can be pulled."""
    try:
        docker("version", seconds=30)
    except (AssertionError, FileNotFoundError, subprocess.TimeoutExpired) as error:
        without_server(f"no Docker answers: {error}")
    given = {base: os.environ.get(f"MAPSTATE_TEST_{base}_IMAGE") for base in bases}
    arguments = [word for base, image in given.items() if image for word in ("--build-arg", f"{base}={image}")]
    docker("build", "--network", "host", "--tag", name, "--file", dockerfile, *arguments, str(ROOT))
    return name


@pytest.fixture(scope="module")
def service_image() -> str:
    return built("mapstate-test", str(ROOT / "Dockerfile"), "PYTHON")


@pytest.fixture(scope="module")
def job_image() -> str:
    return built("mapstate-test-site", str(DEPLOY / "job.Dockerfile"), "PYTHON", "SPARK")


@pytest.fixture
def started() -> Iterator[Callable[..., str]]:
    """Starts a container as the manifests do: no root, nothing of its file system can be written."""
    with ExitStack() as stack:

        def start(image: str, *words: str, options: tuple[str, ...] = (), **environment: str) -> str:
            name = f"mapstate-test-{secrets.token_hex(4)}"
            given = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
            limits = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
            stack.callback(docker, "rm", "--force", "--volumes", name, check=False)
            docker("run", "--detach", "--name", name, "--network", "host", *limits, *given, *options, image, *words)
            return name

        yield start


def eventually(work: Callable[[], Any], seconds: float = 60) -> Any:
    """The first answer of ``work`` that is not None."""
    deadline = time.monotonic() + seconds
    while (answer := work()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return answer


def visits_of_a() -> Any:
    url = "http://127.0.0.1:8080/states/visits_by_page/values?page=a"
    try:
        with urlopen(Request(url, headers={"Authorization": "Bearer t0k"}), timeout=5) as reply:
            return json.load(reply)["value"]
    except URLError:  # the service or the state is not there yet
        return None


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_in_its_image_counts_what_the_service_and_the_commands_read(
    service_image, job_image, started, start_redis, tmp_path
):
    redis_url = start_redis(dbfilename="images.rdb").url  # of this machine, whose network the containers have
    for folder in ("input", "checkpoint"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder).chmod(0o777)
    tmp_path.chmod(0o755)
    pages = ["a", "b", "a", "c", "a"]
    (tmp_path / "input" / "1.json").write_text("".join(f'{{"page": "{page}", "bytes": 5}}\n' for page in pages))
    job = started(
        job_image,
        *("driver", "--master", "local[2]", "/opt/site/site_job.py", "/site/input", "/site/checkpoint"),
        options=("--tmpfs", "/tmp", "--volume", f"{tmp_path}:/site"),
        MAPSTATE_URL=redis_url,
        SPARK_DRIVER_BIND_ADDRESS="127.0.0.1",
        SPARK_LOCAL_IP="127.0.0.1",
    )

    service = started(service_image, MAPSTATE_URL=redis_url, MAPSTATE_TOKEN="t0k")
    try:
        assert eventually(visits_of_a, 240) == {"visits": 3, "bytes": 15}
    except AssertionError as error:
        raise AssertionError(docker("logs", job).stdout[-4000:]) from error
    health = eventually(lambda: health if (health := health_of(service)) != "starting" else None)
    assert health == "healthy"
    assert docker("exec", service, "python", "-c", "import os; print(os.getuid())").stdout.strip() == "10001"

    environment = ("--network", "host", "--env", f"MAPSTATE_URL={redis_url}")
    listed = docker("run", "--rm", *environment, service_image, "ls", "--json")
    assert [state["state"] for state in json.loads(listed.stdout)] == ["visits_by_page"]
    docker("run", "--rm", *environment, service_image, "kill", "site", "--wait", "0")
    assert docker("wait", job, seconds=120).stdout.strip() == "0"
    docker("stop", "--time", "20", service)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", service).stdout.strip() == "0"


def health_of(container: str) -> str:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container).stdout.strip()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_image_has_its_bill_of_materials_and_starts_nothing_without_a_token(service_image):
    read = docker("run", "--rm", "--entrypoint", "cat", service_image, "/opt/mapstate/sbom.json")
    bill = json.loads(read.stdout)
    assert bill["bomFormat"] == "CycloneDX"
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    parts = {part["name"]: part["version"] for part in bill["components"]}
    assert {"mapstate", "redis", "aerospike", "uvicorn"} <= parts.keys()
    assert not [name for name in parts.keys() & pinned.keys() if parts[name] != pinned[name]]
    refused = docker("run", "--rm", "--env", "MAPSTATE_URL=redis://localhost", service_image, check=False)
    assert (refused.returncode, "MAPSTATE_TOKEN" in refused.stderr) == (2, True)
