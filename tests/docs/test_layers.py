"""What a module may import and use of another one, and what `import mapstate` costs a service that only reads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import mapstate

ROOT = Path(mapstate.__file__).parent
MODULES = {
    ".".join(("mapstate", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
# From the bottom up. A module imports only from layers below its own, or from its own.
LAYERS = [
    ("errors", "version"),
    ("waiting",),
    ("drpc", "retry", "urls", "values"),
    ("findings",),
    ("schema",),
    ("sketches", "key_types"),
    ("keys", "protocol.windows", "backing_map"),
    ("serializers",),
    ("capabilities", "event_loop", "protocol.changes", "protocol.records", "protocol.rolling", "protocol.seeds"),
    ("protocol.sessions", "windows"),
    ("protocol.ledger_record",),
    ("protocol.cuts", "protocol.refusals", "protocol.seed_refusals"),
    ("protocol.ways_back",),
    ("protocol.transitions",),
    (
        "protocol.alias",
        "protocol.control",
        "protocol.following",
        "protocol.joint",
        "protocol.opening",
        "protocol.seeding",
        "protocol.upkeep",
    ),
    ("batch_report",),
    ("telemetry",),
    ("aggregators",),
    ("maps",),
    ("protocol.fences", "maps.pane_index", "maps.record_pass", "protocol.stored_ledger"),
    ("maps.change_log", "maps.operator_list", "protocol.ledgers"),
    ("protocol.ledger", "protocol.seed_ledgers"),
    ("backends",),
    ("spec",),
    ("reader",),
    ("operations",),
    ("serve",),
    ("testing", "spark"),
    ("trident",),
    ("cli",),
    ("__main__",),
]
# A store's files or package are loaded when its URL is used, so they alone may import its driver at the top.
DRIVERS = {"redis": "mapstate.backends.redis", "aerospike": "mapstate.backends.aerospike"}
READERS = ("greenlet",)
SPARK = ("pyspark", "py4j", "pyarrow", "pandas", "polars", "numpy")
HEAVY = (*SPARK, *DRIVERS, *READERS, "aerospike_helpers", "sqlite3", "hypothesis", "pytest", "typer", "rich")
# Names with an underscore that a module may use of others, and whose they are.
FOREIGN = {
    "_asdict": "a named tuple's public method",
    "_exit": "os._exit, which is public",
    "_make": "a named tuple's public method",
    "_replace": "a named tuple's public method",
    "_collect_as_arrow": "what toArrow calls, in PySpark 3.5",
    "_explain_string": "what PySpark's explain prints",
    "_expr": "the same under Spark Connect as _jc",
    "_getJavaStorageLevel": "what localCheckpoint calls with a level, in PySpark 3.5",
    "_jc": "PySpark has no public way to compare two expressions",
    "_jdf": "PySpark has no public way to a frame's plan",
    "_jsc": "PySpark has no public way to ask whether Spark is local",
    "_jsparkSession": "PySpark has no public way to the JVM's session",
    "_jvm": "PySpark has no public way to the JVM's classes",
    "_parse_datatype_string": "what DataType.fromDDL calls, in PySpark 3.5",
    "_serialize_to_jvm": "what createDataFrame calls with a table, in PySpark 3.5",
}
# Still to do: names of a base class in another module, and files with more than one subject.
PRIVATE_TO_DO = {
    "mapstate.maps.transactional": {"_attempt"},
}
MOST_LINES = 500
LONGER_TO_DO = {"mapstate.testing.contracts.ledger": 728, "mapstate.testing.faults": 610}


def layer(module):
    """Where the module stands, by the longest name of a layer that it has or lies in."""
    name = module.removeprefix("mapstate.")
    within = [(at, part) for at, parts in enumerate(LAYERS) for part in parts if f"{name}.".startswith(f"{part}.")]
    return max(within, key=lambda found: len(found[1]))[0]


def imports(path, *, lazy=False, typing=False):
    """The modules that a file imports when it is loaded; also those of its functions, or for type checkers only."""
    tree = parsed(path)
    found: list[str] = []

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                whole = [f"{child.module}.{name.name}" for name in child.names]
                found.extend(name if name in MODULES or child.module == "mapstate" else child.module for name in whole)
            elif not typing and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    walk(other)
            elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                walk(child)

    walk(tree)
    return found


def for_each_module(test):
    """One test of all modules: a test of each takes pytest longer than to look at the file."""

    def all_modules():
        wrong = []
        for module in MODULES:
            try:
                test(module)
            except AssertionError as error:
                wrong.append(f"{module}: {error}")
        assert not wrong, "\n".join(wrong)

    all_modules.__name__, all_modules.__doc__ = test.__name__, test.__doc__
    return all_modules


@cache
def parsed(path):
    return ast.parse(path.read_text())


def run(code):
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(HEAVY) - {"sqlite3"}!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_there_are_modules_to_look_at():
    assert {"mapstate", "mapstate.errors", "mapstate.maps.opaque", "mapstate.backends.sqlite"} <= set(MODULES)
    assert "mapstate.errors" in imports(MODULES["mapstate.protocol.ledgers"])
    assert "pyspark.sql" not in imports(MODULES["mapstate.aggregators.sums"])
    assert "pyspark.sql" in imports(MODULES["mapstate.aggregators.sums"], lazy=True)


def test_importing_mapstate_loads_no_driver_and_no_spark():
    assert "asyncio" not in run("import sys, mapstate; print(*sys.modules)").split()
    for module in ("mapstate", "mapstate.reader", "mapstate.backends", "mapstate.maps", "mapstate.aggregators"):
        loaded = run(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})").split()
        assert set(loaded) & set(HEAVY) == set()


def test_a_worker_of_one_redis_server_does_not_wait_for_the_imports_of_a_cluster():
    task = "mapstate.spark.executor.task, mapstate.backends.redis"
    loaded = set(run(f"import sys, {task}; print(*sys.modules)").split())
    assert "mapstate.backends.redis.store" in loaded
    assert not {name for name in loaded if name.startswith("mapstate.backends.redis.cluster")}
    assert "mapstate.backends.third_party" not in loaded


@for_each_module
def test_imports_go_down(module):
    for imported in imports(MODULES[module]):
        if module != "mapstate" and imported.startswith("mapstate."):
            assert layer(imported) <= layer(module), f"{module} imports {imported}, which stands above it"


@for_each_module
def test_nothing_below_spark_imports_spark_even_late(module):
    if module.startswith(("mapstate.spark", "mapstate.cli", "mapstate.trident")):
        return
    late = imports(MODULES[module], lazy=True)
    if module != "mapstate":  # fetches newStream when it is used
        assert not [name for name in late if name.startswith("mapstate.spark")]
    heavy = [name for name in imports(MODULES[module]) if name.partition(".")[0] in SPARK]
    assert heavy == []
    # Aggregators write Spark expressions, a reader makes a table of pyarrow, by which an object store is reached, too,
    # and a fixture starts Spark: in functions.
    inside = (
        "mapstate.aggregators",
        "mapstate.operations.folders",
        "mapstate.reader.tables",
        "mapstate.testing.plugin",
    )
    if not module.startswith(inside):
        assert not [name for name in late if name.partition(".")[0] in SPARK]


def rings(graph):
    """The groups of modules that import each other, directly or through others of their group."""

    def reached(start):
        found, ahead = set(), [start]
        while ahead:
            new = graph[ahead.pop()] - found
            found |= new
            ahead.extend(new)
        return found

    reach = {module: reached(module) for module in graph}
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in graph} - {frozenset()}


def test_a_ring_is_found():
    assert rings({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert rings({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == {frozenset("bc")}
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == {frozenset("abc")}


def test_no_modules_import_each_other_not_even_late_or_for_types():
    def module_of(name):
        return name if name in MODULES else module_of(name.rpartition(".")[0])

    graph = {
        module: {
            module_of(name) for name in imports(path, lazy=True, typing=True) if f"{name}.".startswith("mapstate.")
        }
        - {module}
        for module, path in MODULES.items()
    }
    assert sum(map(len, graph.values())) > len(MODULES)
    assert "mapstate.spark" in graph["mapstate"]  # an import in a function
    assert "mapstate.protocol.ledger_record" in graph["mapstate.spark.executor.task"]  # and one for types only
    assert [sorted(ring) for ring in rings(graph)] == []


@cache
def private_names(source):
    """The names with one underscore that a module uses and defines nowhere: those of other modules."""
    defined, used = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            words = {word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)}
            asks = isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}
            (used if asks else defined).update(words)  # setattr, or a function of the module's own that calls it
    return {name for name in used - defined if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from mapstate.keys import _strings", {"_strings"}),
        ("def f(store):\n    return store._client", {"_client"}),
        ("def f(store):\n    return getattr(store, '_client', None)", {"_client"}),
        ("class A:\n    def f(self):\n        self._own = 1\n        return self._own", set()),
        ("class A:\n    _own: int\n    def f(self, other):\n        return other._own", set()),
        ("class A:\n    def _own(self): ...\n\nA()._own()", set()),
        ("def f(test):\n    setattr(test, '_mark', 1)\n    return getattr(test, '_mark')", set()),
        ("def f(store):\n    return store.__class__", set()),
    ],
)
def test_a_private_name_of_another_module_is_found(source, found):
    assert private_names(source) == found


@for_each_module
def test_a_private_name_is_used_in_its_own_module_only(module):
    assert private_names(MODULES[module].read_text()) - set(FOREIGN) - PRIVATE_TO_DO.get(module, set()) == set()


def test_each_foreign_private_name_that_may_be_used_is_used():
    assert set(FOREIGN) <= set().union(*(private_names(path.read_text()) for path in MODULES.values()))


@for_each_module
def test_a_file_has_one_subject_and_so_few_lines(module):
    assert len(MODULES[module].read_text().splitlines()) <= LONGER_TO_DO.get(module, MOST_LINES)


@for_each_module
def test_a_driver_is_imported_by_its_own_store_only(module):
    for name in imports(MODULES[module], lazy=True):
        owner = DRIVERS.get(name.partition(".")[0])
        own = owner is None or f"{module}.".startswith(f"{owner}.")
        assert own or module.startswith(("mapstate.cli", "mapstate.testing"))


def test_a_service_without_spark_and_drivers_reads():
    out = run(
        WITHOUT
        + """
import mapstate, tempfile
from mapstate.protocol.ledger_record import OpenRequest
from mapstate.protocol.ledgers import Ledgers
from mapstate.schema import Field
from mapstate.backends import resolve
with tempfile.TemporaryDirectory() as place:
    for url in ("memory://", f"sqlite:///{place}/visits.db"):
        store = resolve(url).open("s")
        fields = (Field("n", "Count", "bigint"),)
        opening = OpenRequest(state="s", type="opaque", serializer="json", keys=(), fields=fields, owner="q",
                              clock_txid=1)
        Ledgers([store], [opening], ["refuse"]).open()
        with mapstate.open_reader(url, "s") as reader:
            print(reader.get(()), list(reader.scan()))
        mapstate.opaque(url, "s", ttl=None)
        getattr(store, "close", print)()
"""
    )
    assert out.split("\n")[0] == "None []"


def test_what_needs_spark_says_how_to_install_it_where_there_is_none():
    run(
        WITHOUT
        + """
import mapstate
from mapstate.errors import MissingDriverError
try:
    mapstate.newStream
except MissingDriverError as error:
    assert "mapstate[spark]" in str(error), error
else:
    raise SystemExit("no error")
"""
    )


def test_a_store_whose_driver_is_missing_says_how_to_install_it():
    run(
        WITHOUT
        + """
import mapstate
from mapstate.errors import MissingDriverError
try:
    mapstate.opaque("redis://localhost", "s")
except MissingDriverError as error:
    assert "mapstate[redis]" in str(error), error
    assert error.package == "redis"
else:
    raise SystemExit("no error")
"""
    )


def test_every_name_of_the_package_is_there():
    for name in mapstate.__all__:
        assert getattr(mapstate, name) is not None
    scope = {}
    exec("from mapstate import *", scope)
    assert set(mapstate.__all__) <= set(scope)
    assert set(dir(mapstate)) == {*mapstate.__all__, "__version__"}  # also those that are imported when they are used
    with pytest.raises(AttributeError, match="no_such"):
        _ = mapstate.no_such


def all_of(path):
    """What ``__all__`` says, or None; the names that the module has at its top; its public classes."""
    said, names, classes = None, set(), set()
    for node in parsed(path).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            names |= targets
            if "__all__" in targets:
                said = ast.literal_eval(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.If):  # TYPE_CHECKING, for what __getattr__ fetches
            names |= {one.name for inner in node.body if isinstance(inner, ast.ImportFrom) for one in inner.names}
    return said, names, classes


@for_each_module
def test_a_module_that_says_what_it_offers_offers_it(module):
    """Packages and public modules do; elsewhere an underscore says what is private."""
    said, names, classes = all_of(MODULES[module])
    if said is None:
        assert MODULES[module].name != "__init__.py" or not names, "has no __all__"
        return
    assert len(said) == len(set(said))
    assert set(said) <= names
    assert not [name for name in said if name.startswith("_")]
    assert classes <= set(said), "a public class is not offered"


@for_each_module
def test_every_module_says_its_subject_in_its_first_line(module):
    said = ast.get_docstring(parsed(MODULES[module]))
    assert said
    assert said[0].isupper() or said.startswith("mapstate")


def test_what_only_some_readers_need_says_how_to_install_it():
    run(
        WITHOUT
        + """
import asyncio, mapstate
from mapstate.backends.memory import MemoryBackend
from mapstate.errors import MissingDriverError
from mapstate.protocol.ledger_record import OpenRequest
from mapstate.protocol.ledgers import Ledgers
from mapstate.schema import Field
fields = (Field("n", "Count", "bigint"),)
opening = OpenRequest(state="s", type="opaque", serializer="json", keys=(), fields=fields, owner="q", clock_txid=1)
Ledgers([MemoryBackend().open("s")], [opening], ["refuse"]).open()

class OnALoop(MemoryBackend):
    def on_event_loop(self):
        return self

async def read():
    async with mapstate.open_async_reader("memory://", "s") as reader:  # in threads
        assert await reader.get(()) is None
    await mapstate.open_async_reader(OnALoop(), "s")

def table():
    with mapstate.open_reader("memory://", "s") as reader:
        reader.to_pandas()

def polars():
    with mapstate.open_reader("memory://", "s") as reader:
        mapstate.StateReader.to_arrow = lambda *_, **__: None
        reader.to_polars()

calls = (table, "pyarrow", "tables"), (lambda: asyncio.run(read()), "greenlet", "redis"), (polars, "polars", "polars")
for call, package, extra in calls:
    try:
        call()
    except MissingDriverError as error:
        assert f"mapstate[{extra}]" in str(error), error
        assert error.package == package, error.package
    else:
        raise SystemExit("no error")
"""
    )


def test_nothing_is_made_at_import():
    """No client, no thread, no file: a spec is all there is until a store is opened."""
    out = run(
        "import threading, mapstate, mapstate.backends.memory, mapstate.backends.sqlite, mapstate.protocol.ledger;"
        "mapstate.opaque('sqlite:///x.db', 's');"
        "import os; print(threading.active_count(), os.path.exists('x.db'))"
    )
    assert out == "1 False\n"
