"""examples/access_log.py against a count that owes it nothing: every key, every line, on every store."""

import gzip
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import datetime
from importlib import util
from pathlib import Path
from uuid import uuid4

import pytest
from cases import full

from mapstate import open_reader

ROOT = Path(__file__).resolve().parents[2]
MADE_UP = ROOT / "tests/data/access_log/made_up.log"
REAL = ROOT.parent / "shared/data/apache_logs"

pytestmark = pytest.mark.spark


def _load(name):
    spec = util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


access_log = _load("access_log")


def by_hand(line):
    """(client, url, status, bytes) of a line, or the reason why it has none: written without regular expressions."""
    if len(line) > 65536:
        return "too-long"
    if not line.split():
        return "empty"
    line = line.removesuffix(b"\r")
    at = -1
    while (at := line.find(b" [", at + 1)) >= 0:
        head = line[:at].split(b" ", 2)
        if len(head) < 3 or not all(head) or line[at + 28 : at + 31] != b'] "':
            continue
        if head[2] != b'""' and _quoted(b'"' + head[2])[1]:
            continue
        with suppress(ValueError):
            datetime.strptime(line[at + 2 : at + 28].decode("ascii", "replace"), "%d/%b/%Y:%H:%M:%S %z")
            break
    else:
        return "no-log-line"
    request, closed, rest = _quoted(line[at + 30 :])
    status, _, size_and_tail = rest.removeprefix(b" ").partition(b" ")
    size, space, tail = size_and_tail.partition(b" ")
    sound = closed and rest[:1] == b" " and len(status) == 3 and status.isdigit()
    sound = sound and (size == b"-" or (size.isdigit() and len(size) <= 15))
    if not sound or (space and not _referrer_and_agent(tail)):
        return "no-log-line"
    method, _, url_and_version = request.partition(b" ")
    url, _, version = url_and_version.rpartition(b" ")
    if (
        not method.replace(b"-", b"").replace(b"_", b"").isalpha()
        or not url
        or url[:1].isspace()
        or version not in (b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"HTTP/2", b"HTTP/3")
    ):
        return "no-request"
    return (
        head[0].decode("utf-8", "replace"),
        url.decode("utf-8", "replace"),
        int(status),
        None if size == b"-" else int(size),
    )


def _referrer_and_agent(tail):
    """Whether that is what it is: two quoted texts, or as much of them as there was room for."""
    for last in (False, True):
        if tail[:1] != b'"':
            return False
        _, closed, tail = _quoted(tail)
        if not closed or not tail:
            return True
        if last or tail[:1] != b" ":
            return False
        tail = tail[1:]
    raise AssertionError


def _quoted(text):
    """What stands between the quote that ``text`` starts with and the next one; whether there is one; the rest."""
    at = 1
    while at < len(text) and text[at : at + 1] != b'"':
        at += 2 if text[at : at + 1] == b"\\" else 1
    return text[1:at], text[at : at + 1] == b'"', text[at + 1 :]


def lines_of(data):
    return data.removesuffix(b"\n").split(b"\n")


class Truth:
    """What the three states and the rejects have to be."""

    def __init__(self, lines):
        clients, urls, rejects, self.rejected_lines = {}, {}, Counter(), Counter()
        for line in lines:
            found = by_hand(line)
            if isinstance(found, str):
                rejects[found] += 1
                self.rejected_lines[found, line] += 1
                continue
            client, url, _, size = found
            for totals, key in ((clients, client), (urls, url)):
                hits, total = totals.get((key,), (0, None))
                totals[(key,)] = (hits + 1, total if size is None else (total or 0) + size)
        self.states = {
            "hits_by_client": {key: {"hits": hits, "bytes": size} for key, (hits, size) in clients.items()},
            "hits_by_url": {key: {"hits": hits, "bytes": size} for key, (hits, size) in urls.items()},
            "rejects_by_reason": {(reason,): {"lines": lines} for reason, lines in rejects.items()},
        }


NOON = b"[01/Mar/2026:12:00:00 +0100]"
FRONT = b"192.0.2.1 - - " + NOON
LONGEST = FRONT + b' "GET /%s HTTP/1.1" 200 5' % (b"a" * 65_471)
assert len(LONGEST) == 65_536
ODD = {
    "common format": (FRONT + b' "GET / HTTP/1.0" 200 5', ("192.0.2.1", "/", 200, 5)),
    "combined format": (FRONT + b' "GET /?q=1 HTTP/2.0" 200 0 "-" "curl"', ("192.0.2.1", "/?q=1", 200, 0)),
    "escaped quotes": (
        FRONT + rb' "GET /\"a\" HTTP/1.1" 200 5 "https://example.org/\"" "\"agent\" \\"',
        ("192.0.2.1", r"/\"a\"", 200, 5),
    ),
    "no bytes": (FRONT + b' "GET / HTTP/1.1" 304 -', ("192.0.2.1", "/", 304, None)),
    "IPv6": (b"2001:db8::1 - - " + NOON + b' "GET / HTTP/1.1" 200 5', ("2001:db8::1", "/", 200, 5)),
    "user with spaces": (b"host - a b c " + NOON + b' "GET / HTTP/1.1" 200 5', ("host", "/", 200, 5)),
    "user with brackets": (b"host - [a] " + NOON + b' "GET / HTTP/1.1" 200 5', ("host", "/", 200, 5)),
    "user with a quote": (b'host - a \\" [b ' + NOON + b' "GET / HTTP/1.1" 200 5', ("host", "/", 200, 5)),
    "user without a name": (b'host - "" ' + NOON + b' "GET / HTTP/1.1" 401 5', ("host", "/", 401, 5)),
    "CRLF": (FRONT + b' "GET / HTTP/1.1" 200 5 "-" "-"\r', ("192.0.2.1", "/", 200, 5)),
    "CR in the middle": (FRONT + b' "GET /a\rb HTTP/1.1" 200 5', ("192.0.2.1", "/a\rb", 200, 5)),
    "spaces in the URL": (FRONT + b' "GET /a b HTTP/1.1" 200 5', ("192.0.2.1", "/a b", 200, 5)),
    "a line separator that is none": (
        FRONT + b' "GET /\xe2\x80\xa8 HTTP/1.1" 200 5',
        ("192.0.2.1", "/\u2028", 200, 5),
    ),
    "UTF-8": (FRONT + b' "GET /\xc3\xa9 HTTP/1.1" 200 5', ("192.0.2.1", "/\xe9", 200, 5)),
    "no UTF-8": (FRONT + b' "GET /\xe9\xe2\x82x\xff HTTP/1.1" 200 5', ("192.0.2.1", "/\ufffd\ufffdx\ufffd", 200, 5)),
    "no UTF-8 in what is not kept": (FRONT + b' "GET / HTTP/1.1" 200 5 "-" "\xff"', ("192.0.2.1", "/", 200, 5)),
    "cut off in the referrer": (FRONT + b' "GET / HTTP/1.1" 200 5 "htt', ("192.0.2.1", "/", 200, 5)),
    "cut off in the agent": (FRONT + b' "GET / HTTP/1.1" 200 5 "-" "Moz', ("192.0.2.1", "/", 200, 5)),
    "cut off in the request": (FRONT + b' "GET /', "no-log-line"),
    "two lines in one": (
        FRONT + b' "GET / HTTP/1.1" 200 5 "-" "Mo' + FRONT + b' "GET / HTTP/1.1" 200 5',
        "no-log-line",
    ),
    "bytes above any file's size": (FRONT + b' "GET / HTTP/1.1" 200 9999999999999999', "no-log-line"),
    "bytes below 0": (FRONT + b' "GET / HTTP/1.1" 200 -5', "no-log-line"),
    "a time that is none": (b'192.0.2.1 - - [noon] "GET / HTTP/1.1" 200 5', "no-log-line"),
    "prose": (b"this is no log line", "no-log-line"),
    "zeros": (b"\0" * 100, "no-log-line"),
    "no request": (FRONT + b' "-" 408 - "-" "-"', "no-request"),
    "an empty request": (FRONT + b' "" 400 0', "no-request"),
    "TLS": (FRONT + rb' "\x16\x03\x01" 400 0', "no-request"),
    "TLS, raw": (FRONT + b' "\x16\x03\x01\xfe" 400 0', "no-request"),
    "a request without a version": (FRONT + b' "GET /" 400 0', "no-request"),
    "a request without a URL": (FRONT + b' "GET HTTP/1.1" 400 0', "no-request"),
    "empty": (b"", "empty"),
    "white space": (b" \t \r", "empty"),
    "as long as may be": (LONGEST, ("192.0.2.1", LONGEST.split()[6].decode(), 200, 5)),
    "longer": (LONGEST + b"5", "too-long"),
    "a million": (b"a" * 1_000_000, "too-long"),
    "escapes without end": (
        FRONT + b' "GET / HTTP/1.1" 200 5 "-" "' + rb"\"" * 30_000 + b'"',
        ("192.0.2.1", "/", 200, 5),
    ),
    "times without end": (FRONT + (b" " + NOON + b' "') * 2_000, "no-log-line"),
}


def test_each_odd_line_is_parsed_or_rejected_for_its_reason(spark, tmp_path):
    (tmp_path / "odd.log").write_bytes(b"\n".join(line for line, _ in ODD.values()))
    lines = spark.read.option("lineSep", "\n").text(str(tmp_path))
    rows = access_log.parse(lines).drop("value").collect()
    found = [row["reason"] or tuple(row)[:4] for row in rows]
    assert dict(zip(ODD, found, strict=True)) == {name: expected for name, (_, expected) in ODD.items()}
    assert {name: by_hand(line) for name, (line, _) in ODD.items()} == {name: one for name, (_, one) in ODD.items()}


@pytest.fixture(params=[*(pytest.param(one, marks=pytest.mark.full) for one in ("memory", "sqlite")), "redis"])
def store(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid4().hex}"
    return f"sqlite:///{tmp_path}/hits.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


class Job:
    """The job of the example, in directories of its own; run as often as wanted."""

    def __init__(self, spark, store, folder):
        self.spark, self.store, self.folder = spark, store, folder
        self.logs = folder / "logs"
        self.logs.mkdir()

    def put(self, name, lines, days_old=0):
        data = b"\n".join(lines) + b"\n"
        path = self.logs / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        then = time.time() - days_old * 86400
        os.utime(path, (then, then))

    def run(self, files_per_batch=100):
        queries = access_log.start(
            access_log.read_logs(self.spark, str(self.logs), files_per_batch),
            self.store,
            checkpoint=str(self.folder / "checkpoint"),
            rejects=str(self.folder / "rejects"),
            trigger={"availableNow": True},
        )
        for query in queries:
            query.awaitTermination()

    def check(self, lines):
        """Every key of every state, every rejected line, and that nothing is missing between them."""
        truth = Truth(lines)
        for state, expected in truth.states.items():
            assert self.state(state) == expected
        rejected = Counter()
        for path in (self.folder / "rejects").glob("reason=*/*.txt"):
            reason = path.parent.name.removeprefix("reason=")
            rejected.update((reason, line) for line in lines_of(path.read_bytes()))
        assert rejected == truth.rejected_lines
        hits = sum(one["hits"] for one in self.state("hits_by_url").values())
        assert hits + rejected.total() == len(lines)

    def state(self, name):
        with open_reader(self.store, name) as reader:
            return dict(reader.scan())

    def batches(self, name):
        with open_reader(self.store, name) as reader:
            return reader.ledger().last_commit.batch_id + 1


@pytest.fixture
def job(spark, store, tmp_path):
    return Job(spark, store, tmp_path)


def pieces(lines, count):
    size = -(-len(lines) // count)
    return [lines[at : at + size] for at in range(0, len(lines), size)]


def run_in_two_goes(job, lines):
    """Five files, plain and gzip, in batches of two; the second go brings files older than those of the first."""
    parts = pieces(lines, 5)
    for at, part in enumerate(parts[:3]):
        job.put(f"part-{at}.log" + ".gz" * (at % 2), part)
    job.run(files_per_batch=2)
    for at, part in enumerate(parts[3:]):
        job.put(f"late-{at}.log" + ".gz" * (at % 2), part, days_old=30)
    job.run(files_per_batch=2)
    assert job.batches("hits_by_url") == 3


def test_every_key_of_the_made_up_log_is_counted_exactly(job):
    lines = lines_of(MADE_UP.read_bytes())
    run_in_two_goes(job, lines)
    job.check(lines)
    assert len(lines) == 339
    assert job.state("rejects_by_reason") == {
        ("empty",): {"lines": 4},
        ("no-log-line",): {"lines": 9},
        ("no-request",): {"lines": 5},
    }


@pytest.mark.skipif(not REAL.exists(), reason=f"there is no {REAL.name} beside this repository")
def test_every_key_of_a_real_log_is_counted_exactly(job):
    lines = lines_of(REAL.read_bytes())
    run_in_two_goes(job, lines)
    job.check(lines)
    # And once more as awk would do it: awk '{print $1}', awk '{print $7}'.
    for state, column in (("hits_by_client", 0), ("hits_by_url", 6)):
        counted = Counter(line.decode().split()[column] for line in lines)
        assert {key: one["hits"] for (key,), one in job.state(state).items()} == dict(counted)


@pytest.mark.parametrize("name", [full("whole.log"), "whole.log.gz"])
def test_one_file_plain_or_gzip_gives_the_same_counts(spark, tmp_path, name):
    job = Job(spark, f"memory://{uuid4().hex}", tmp_path)
    lines = lines_of(MADE_UP.read_bytes())
    job.put(name, lines)
    job.run()
    job.run()  # nothing new, so nothing changes
    job.check(lines)


def command(folder, *more):
    return [
        *("--logs", str(folder / "logs"), "--store", f"sqlite:///{folder}/hits.db"),
        *("--checkpoint", str(folder / "checkpoint"), "--rejects", str(folder / "rejects"), "--partitions", "2"),
        *more,
    ]


def test_the_command_reports_and_says_the_same_when_nothing_is_new(spark, tmp_path, capsys):
    job = Job(spark, f"sqlite:///{tmp_path}/hits.db", tmp_path)
    lines = lines_of(MADE_UP.read_bytes())
    job.put("made_up.log", lines)
    access_log.main(command(tmp_path, "--top", "1000"))
    first = capsys.readouterr().out
    clients, urls = (len(Truth(lines).states[state]) for state in ("hits_by_client", "hits_by_url"))
    assert f"hits_by_client: {clients} keys, 321 hits" in first
    assert f"hits_by_url: {urls} keys, 321 hits" in first
    assert "rejects_by_reason: 18 lines" in first
    assert "\x1b[31m" not in first  # one URL of the log would colour the terminal
    access_log.main(command(tmp_path, "--top", "1000"))
    assert capsys.readouterr().out == first


def test_the_report_needs_neither_rich_nor_a_state(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    access_log.report(f"sqlite:///{tmp_path}/hits.db")
    access_log.show("title", ("name", "number"), [("a\x1b[31mb", 1234)])
    out = capsys.readouterr().out
    assert "hits_by_url: 0 keys, 0 hits" in out
    assert "a\ufffd[31mb" in out
    assert "1,234" in out
