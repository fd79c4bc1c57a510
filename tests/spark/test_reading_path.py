"""How much code a reader has to follow a batch or a read through, as scripts/reading_path.py finds it."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest
from spark_fixtures import STORES_OF_BYTES

import mapstate

pytestmark = pytest.mark.spark

SCRIPT = Path(__file__).parents[2] / "scripts" / "reading_path.py"
# Files, hundreds of lines, and entries into files. The goal is 20 files, 48 hundred lines and 120 entries in a second
# batch on Redis. The session of the tests has two tasks, and so more entries in batches than the script prints. A
# change that shortens a way lowers its bounds.
MOST = {
    "memory": {
        "first batch": (29, 59, 118),
        "second batch": (21, 45, 98),
        "batch that fires": (32, 72, 209),
        "first get": (15, 36, 53),
        "second get": (10, 25, 22),
        "second GET": (8, 23, 34),
    },
    "sqlite": {
        "first batch": (31, 63, 162),
        "second batch": (22, 48, 133),
        "batch that fires": (33, 75, 285),
        "first get": (18, 42, 61),
        "second get": (10, 27, 21),
        "second GET": (8, 23, 34),
    },
    "redis": {
        "first batch": (34, 72, 202),
        "second batch": (22, 52, 163),
        "batch that fires": (34, 80, 333),
        "first get": (20, 48, 79),
        "second get": (11, 29, 24),
        "second GET": (20, 50, 79),
    },
}


@pytest.fixture(scope="module")
def tracer():
    spec = importlib.util.spec_from_file_location("reading_path", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def traced():
    return {}


@pytest.fixture
def paths(spark, tracer, traced, each_url):
    """Those of each way on a store, traced once."""
    store = each_url.partition(":")[0]
    if store not in traced:
        gc.collect()  # else what another test has left is closed within the trace
        traced[store] = tracer.reading_path(spark, each_url)
    return store, traced[store]


@pytest.mark.parametrize("each_url", STORES_OF_BYTES, indirect=True)
def test_no_way_gets_longer(paths):
    store, ways = paths
    assert ways.keys() == MOST[store].keys()
    for way, (files, hundreds, entries) in MOST[store].items():
        path = ways[way]
        assert len(path) <= files, f"{way}: {' '.join(file.name for file in path)}"
        assert sum(file.lines for file in path) <= hundreds * 100, (way, [(file.lines, file.name) for file in path])
        assert sum(file.entries for file in path) <= entries, (way, [(file.entries, file.name) for file in path])


@pytest.mark.parametrize("each_url", STORES_OF_BYTES, indirect=True)
def test_the_tracer_sees_the_driver_and_its_tasks_in_order_and_no_imports(paths):
    _, ways = paths
    first, second = ways["first batch"], ways["second batch"]
    for path in (first, second):
        called = {file.name: file.functions for file in path}
        for file in path:
            whole = (Path(mapstate.__file__).parent / file.name).read_text()
            assert file.lines == whole.count("\n")
            assert 0 < file.run < file.lines
            assert file.entries > 0
        assert "BatchDriver.run" in called["spark/driver/batch.py"]
        assert "BatchTask.__call__" in called["spark/executor/task.py"]
        assert "OpaqueMap.multi_combine" in called["maps/opaque.py"]
        order = list(called)
        assert (
            order.index("spark/driver/batch.py") < order.index("spark/executor/task.py") < order.index("maps/opaque.py")
        )
        assert not [name for functions in called.values() for name in functions if name == "<module>"]
        assert "errors.py" not in called  # only its classes' bodies run, at import
    assert "open_ledger" in {name for file in first for name in file.functions}
    assert "open_ledger" not in {name for file in second for name in file.functions}
