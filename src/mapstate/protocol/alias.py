"""The alias of a name: which version of a state the readers of the name read.

One pure function per event, as in `mapstate.protocol.control`; `mapstate.operations.swap` runs them against a store.
Writers never look at it: a job owns a version.
"""

from __future__ import annotations

import msgspec

from mapstate.errors import CorruptRecordError, UsageError, cut
from mapstate.protocol.ledger_record import ALIAS_MARK

ALIAS_SUFFIX = ".alias"
"""Behind the name: the name under which a store keeps the record, where it keeps the ledger of a state."""


class AliasRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The alias of one name.

    ``alias``   the name; the first field of the JSON, and none of a ledger
    ``to``      the version that readers read
    ``before``  the version that they read before the last swap; None if it is not kept
    ``keeps``   the versions that a swap may go to, which are not dropped
    ``number``  rises with each swap; 0 before the first one
    """

    alias: str
    to: str
    before: str | None
    keeps: tuple[str, ...]
    number: int


def swap(record: AliasRecord | None, name: str, to: str, before: str | None) -> AliasRecord:
    """Readers go from version ``before``, None where the name has no state, to another one, which is kept from now on.

    Raises UsageError if they read it already.
    """
    if before == to:
        raise UsageError(f"{name!r} leads to {to!r} already. Nothing was written.")
    keeps = () if record is None else record.keeps
    kept = dict.fromkeys([*keeps, *([] if before is None else [before]), to])
    number = 1 if record is None else record.number + 1
    return AliasRecord(alias=name, to=to, before=before, keeps=tuple(kept), number=number)


def keep(record: AliasRecord | None, name: str, to: str) -> AliasRecord:
    """A version is kept, and readers do not read it yet."""
    if record is None:
        return AliasRecord(alias=name, to=name, before=None, keeps=(name, to), number=0)
    return msgspec.structs.replace(record, keeps=(*record.keeps, to))


def keep_only(record: AliasRecord) -> AliasRecord:
    """The present version alone is kept; the others may be dropped then."""
    return msgspec.structs.replace(record, before=None, keeps=(record.to,))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AliasRecord)


def is_alias(data: object) -> bool:
    """Whether this is an alias, where a ledger may be, or what another program wrote."""
    return isinstance(data, bytes) and data.startswith(ALIAS_MARK)


def encode_alias(record: AliasRecord) -> bytes:
    """Encode an alias as JSON, which can be read in the store's own shell."""
    return _encoder.encode(record)


def decode_alias(data: bytes, name: str) -> AliasRecord:
    """Decode an alias. Raises CorruptRecordError for anything else."""
    try:
        record = _decoder.decode(data)
        flaw = f"it is that of {cut(record.alias)}"
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        record, flaw = None, cut(error)
    if record is not None and record.alias == name:
        if record.to in record.keeps and record.number >= 0:
            return record
        flaw = "it does not keep where it leads to"
    raise CorruptRecordError(
        f"the alias of {name!r} cannot be read ({flaw}): a state has this name, or another program or a newer mapstate "
        "wrote it. Nothing was written. Read a version by its own name, with follow=None.",
        state=name,
    )
