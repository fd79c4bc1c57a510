"""Stores of other packages, found by their URL's scheme."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from mapstate import opaque
from mapstate.backends import resolve
from mapstate.backends.memory import MemoryBackend
from mapstate.errors import ConfigurationError, MissingDriverError, UnknownSchemeError

MODULE = """
from dataclasses import dataclass
from mapstate.errors import ConfigurationError

@dataclass(frozen=True)
class NixBackend:
    place: str
    shared_between_processes = True
    def open(self, state, *, ttl=None):
        return {}

def from_url(url):
    if "wrong" in url:
        raise ConfigurationError("no such place")
    return NixBackend(url.partition("//")[2])

def raises(url):
    raise ValueError(f"cannot read {url}")

def gives_nothing(url):
    return None
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package as pip does, as far as importlib can see: a module and its metadata."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(package, *points, module=MODULE):
        name = package.replace("-", "_")
        (tmp_path / f"{name}.py").write_text(module)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "\n".join(f"{scheme} = {value}" for scheme, value in points)
        (info / "entry_points.txt").write_text(f"[mapstate.backends]\n{lines}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path

    return installed


def test_a_scheme_of_another_package_is_a_store_like_any_other(install):
    install("mapstate-nix", ("nix", "mapstate_nix:from_url"))
    backend = resolve("nix://there")
    assert backend.place == "there"
    assert resolve("NIX://there") == backend
    assert opaque("nix://there", name="s").backend == backend
    assert pickle.loads(pickle.dumps(backend)) == backend


def test_an_executor_needs_no_entry_point(install, tmp_path):
    """A pickled spec holds the backend, and not its URL."""
    place = install("mapstate-nix", ("nix", "mapstate_nix:from_url"))
    spec = pickle.dumps(opaque("nix://there", name="s"))
    (place / "mapstate_nix-1.0.dist-info" / "entry_points.txt").unlink()
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).backend.place)"
    environment = os.environ | {"PYTHONPATH": str(place)}
    ran = subprocess.run([sys.executable, "-c", code], input=spec, capture_output=True, env=environment, check=True)
    assert ran.stdout == b"there\n"


def test_a_scheme_that_nobody_has_lists_what_there_is(install):
    install("mapstate-nix", ("nix", "mapstate_nix:from_url"))
    with pytest.raises(
        UnknownSchemeError, match=r"nosuch://; there is aerospike://, memory://, nix://, redis://"
    ) as caught:
        resolve("nosuch://user:hunter2@host")
    assert caught.value.scheme == "nosuch"
    assert "hunter2" not in str(caught.value)
    for url in ("visits.db", "nix:there", ""):
        with pytest.raises(UnknownSchemeError, match=r"without a scheme.* A file's URL is sqlite:///visits\.db,"):
            resolve(url)


def test_a_scheme_of_mapstates_own_stays_its_own(install):
    install("mapstate-nix", ("memory", "mapstate_nix:from_url"))
    assert resolve("memory://there") == MemoryBackend("there")


def test_a_package_that_cannot_be_imported_is_named(install):
    install("mapstate-broken", ("broken", "mapstate_broken:from_url"), module="1 / 0\n")
    with pytest.raises(ConfigurationError, match=r"broken://.*'mapstate-broken'.*ZeroDivisionError") as caught:
        resolve("broken://there")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_entry_point_to_nothing_names_its_package(install):
    install("mapstate-broken", ("broken", "mapstate_broken:nothing"))
    with pytest.raises(ConfigurationError, match=r"'mapstate-broken'.*'mapstate_broken:nothing' cannot be loaded"):
        resolve("broken://there")


def test_a_package_whose_driver_is_missing_is_named_with_the_driver(install):
    install("mapstate-broken", ("broken", "mapstate_broken:from_url"), module="import no_such_driver\n")
    with pytest.raises(MissingDriverError, match=r"'mapstate-broken', which needs the module 'no_such_driver'"):
        resolve("broken://there")


def test_what_is_no_backend_is_refused_with_the_package(install):
    install("mapstate-broken", ("broken", "mapstate_broken:gives_nothing"), ("kind", "mapstate_broken:NixBackend"))
    with pytest.raises(ConfigurationError, match=r"'mapstate-broken'.*gave a NoneType and no Backend"):
        resolve("broken://there")


def test_what_a_package_says_of_a_url_comes_through_and_its_defects_show_no_password(install):
    install("mapstate-broken", ("broken", "mapstate_broken:raises"), ("nix", "mapstate_broken:from_url"))
    with pytest.raises(ConfigurationError, match="no such place"):
        resolve("nix://wrong")
    with pytest.raises(ConfigurationError, match=r"'mapstate-broken'.*could not read the URL: ValueError") as caught:
        resolve("broken://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_scheme_that_two_packages_claim_is_refused_with_both(install):
    install("mapstate-nix", ("nix", "mapstate_nix:from_url"))
    install("another-nix", ("nix", "another_nix:from_url"))
    with pytest.raises(ConfigurationError, match="nix:// is claimed by another-nix and mapstate-nix"):
        resolve("nix://there")
