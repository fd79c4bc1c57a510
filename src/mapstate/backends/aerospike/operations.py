"""What only operators ask of an Aerospike namespace: its states, and settings by which it can lose or refuse writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from aerospike import exception as driver

from mapstate.backends.aerospike.connection import Connection
from mapstate.backends.aerospike.records import CLAIMS, LEDGER
from mapstate.capabilities import state_in
from mapstate.findings import Finding


def states_in(connection: Connection, namespace: str, name_of_set: str | None) -> Iterator[list[tuple[str, bytes]]]:
    """See `ListsStates.states`: one page. A set has the name of its state, or, where it is given, another one."""
    sets = _sets(connection, namespace) if name_of_set is None else [name_of_set]
    page = []
    for entry in sets:
        ledger = _ledger(connection, namespace, entry)
        if ledger is not None:
            page.append((entry if name_of_set is None else state_in(ledger) or entry, ledger))
    yield page


def _sets(connection: Connection, namespace: str) -> list[str]:
    """The sets of a namespace, but for that of the claims. Each node knows those of its own records."""
    replies = connection.retrying(lambda: connection.client.info_all(f"sets/{namespace}"))
    texts = [str(text) for error, text in replies.values() if error is None]
    names = {name for text in texts for name in re.findall(r"\bset(?:_name)?=([^:;\s]+)", text)}
    return sorted(names - {CLAIMS})


def _ledger(connection: Connection, namespace: str, name_of_set: str) -> bytes | None:
    def get() -> bytes | None:
        try:
            bins = connection.client.get((namespace, name_of_set, LEDGER), connection.policy)[2]
        except driver.RecordNotFound:
            return None
        ledger = bins.get("ledger")
        return bytes(ledger) if isinstance(ledger, bytes | bytearray) else None

    return connection.retrying(get)


def judge(namespace: str, *, claims_expire: bool) -> Iterator[Finding]:
    """The findings. ``namespace`` is a node's reply to ``namespace/NAME``: ``name=value`` joined by ``;``."""
    facts = dict(part.partition("=")[::2] for part in namespace.split(";") if "=" in part)
    yield _ttl(facts, claims_expire=claims_expire)
    yield _evictions(facts)
    yield _copies(facts)
    yield _persistence(facts)
    full = any(facts.get(name) == "true" for name in ("stop_writes", "clock_skew_stop_writes"))
    advice = "Give the namespace memory or disk, or look at the nodes' clocks." if full else ""
    yield Finding("error" if full else "ok", "stop writes", "writes are refused" if full else "no", "no", advice)


def _ttl(facts: dict[str, str], *, claims_expire: bool) -> Finding:
    allowed = facts.get("nsup-period", "0") != "0" or facts.get("allow-ttl-without-nsup") == "true"
    setting = f"nsup-period {facts.get('nsup-period', 'unknown')}"
    expected = "above 0: claims, and records with a ttl, are removed by it"
    if allowed or not claims_expire:
        return Finding("ok", "ttl", setting, expected)
    return Finding("error", "ttl", setting, expected, "Set nsup-period, or claim_ttl=0 in the URL: claims then stay.")


def _evictions(facts: dict[str, str]) -> Finding:
    evicted = int(facts.get("evicted_objects", "0") or 0)
    expected = "none: an evicted record is a lost value, an evicted claim lets a late task write"
    if not evicted:
        return Finding("ok", "evictions", "none", expected)
    advice = "Give the namespace room, and switch eviction off (evict-used-pct 0, or evict-tenths-pct 0)."
    return Finding("error", "evictions", f"{evicted} records of this node since its start", expected, advice)


def _copies(facts: dict[str, str]) -> Finding:
    copies = facts.get("effective_replication_factor") or facts.get("replication-factor", "unknown")
    expected = "at least two copies; for more, strong consistency with commit-to-device"
    if facts.get("strong-consistency") == "true":
        flushed = facts.get("storage-engine.commit-to-device", "unknown")
        expunges = facts.get("strong-consistency-allow-expunge") == "true"
        setting = f"strong, {copies} copies of each record, commit-to-device {flushed}"
        setting += "; expunge is allowed: what was removed or has expired may come back" * expunges
        if flushed == "true":
            return Finding("ok", "consistency", setting, expected)
        advice = f"Set commit-to-device true: {copies} nodes that crash lose what was not on a device yet."
        return Finding("warning", "consistency", setting, expected, advice)
    setting = f"available, {copies} copies of each record: a network that splits loses acknowledged writes, unnoticed"
    if copies in ("1", "unknown"):
        advice = "With one copy a node's records are lost with it, and the ledger may not be. Set replication-factor 2."
        return Finding("warning", "consistency", setting, expected, advice)
    return Finding("ok", "consistency", setting, expected)


def _persistence(facts: dict[str, str]) -> Finding:
    engine = facts.get("storage-engine", "unknown")
    backed = any(name.startswith(("storage-engine.file[", "storage-engine.device[")) for name in facts)
    expected = "files or devices: what is in memory alone is gone after a restart of the cluster"
    if engine != "memory" or backed:
        return Finding("ok", "persistence", engine, expected)
    return Finding("warning", "persistence", "memory alone", expected, "Give the namespace files or devices.")
