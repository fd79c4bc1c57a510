"""Columns of integers as bytes: a letter for their width, as in `array`, then the numbers, little-endian.

Those of doubles, with the letter ``d``, can be read in the same way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from sys import byteorder
from typing import Any

WIDTHS = {ord("b"): 1, ord("h"): 2, ord("i"): 4, ord("q"): 8}
"""The bytes of a number, by the letter."""
_FORMS = {ord(letter): Struct(f"<{letter}") for letter in "bhiqd"}


def packed(numbers: Sequence[Any]) -> bytes | None:
    """The bytes of integers; None where one is null, or has more than 64 bits."""
    for letter in WIDTHS:
        try:
            return bytes((letter,)) + _little_endian(array(chr(letter), numbers)).tobytes()
        except OverflowError:
            continue
        except TypeError:
            return None
    return None


def packed_count(data: bytes, skipped: int = 0) -> int:
    """How many numbers there are behind some bytes. Raises KeyError, IndexError or ValueError for no column."""
    size, width = len(data) - 1 - skipped, WIDTHS[data[skipped]]
    if size % width:
        raise ValueError(f"{len(data)} bytes are no column")
    return size // width


def unpacked(data: bytes) -> list[Any]:
    """The numbers."""
    return _little_endian(array(chr(data[0]), data[1:])).tolist()


def number_at(column: Any, at: int) -> Any:
    """A value of a column, which is packed or a list."""
    if type(column) is not bytes:
        return column[at]
    form = _FORMS[column[0]]
    return form.unpack_from(column, 1 + at * form.size)[0]


def numbers_at(column: Any, places: Sequence[int]) -> Any:
    """A column of the values at some places."""
    if type(column) is not bytes:
        return [column[i] for i in places]
    width = WIDTHS[column[0]]
    return column[:1] + b"".join([column[1 + i * width : 1 + (i + 1) * width] for i in places])


def with_number(column: Any, first: int, end: int, value: Any) -> Any:
    """The column with one value in the place of those from ``first`` to ``end``, which may be none.

    A list is changed in place, and a packed column becomes one where the value does not fit.
    """
    if type(column) is bytes:
        width = WIDTHS[column[0]]
        try:
            packed = value.to_bytes(width, "little", signed=True)
        except (OverflowError, AttributeError):  # wider than the others; null
            column = unpacked(column)
        else:
            return column[: 1 + first * width] + packed + column[1 + end * width :]
    column[first:end] = [value]
    return column


def unpacked_all(np: Any, columns: Sequence[bytes], counts: Any) -> Any:
    """The numbers of all columns in one array of numpy. ``counts`` has how many are in each."""
    letters = bytes([column[0] for column in columns])
    kinds = set(letters)
    if len(kinds) == 1:
        return np.frombuffer(b"".join([column[1:] for column in columns]), f"<i{WIDTHS[letters[0]]}").astype(np.int64)
    out, of = np.empty(int(counts.sum()), np.int64), np.repeat(np.frombuffer(letters, np.uint8), counts)
    for kind in kinds:
        packed = b"".join([column[1:] for column in columns if column[0] == kind])
        out[of == kind] = np.frombuffer(packed, f"<i{WIDTHS[kind]}")
    return out


def packed_all(np: Any, numbers: Any, counts: Any) -> list[bytes]:
    """The reverse: the columns of an array's numbers. Each count is 1 at least."""
    ends = np.cumsum(counts)
    largest = np.maximum.reduceat(numbers ^ (numbers >> 63), ends - counts)
    classes = np.searchsorted([1 << 7, 1 << 15, 1 << 31], largest, side="right")
    out: list[bytes] = [b""] * len(counts)
    for kind, letter in enumerate(b"bhiq"):
        places = np.flatnonzero(classes == kind)
        if not len(places):
            continue
        some = numbers if len(places) == len(counts) else numbers[np.repeat(classes == kind, counts)]
        data, width, head = some.astype(f"<i{WIDTHS[letter]}").tobytes(), WIDTHS[letter], bytes([letter])
        last = np.cumsum(counts[places]) * width
        spans = zip(places.tolist(), (last - counts[places] * width).tolist(), last.tolist(), strict=True)
        for i, start, end in spans:
            out[i] = head + data[start:end]
    return out


def _little_endian(numbers: array[Any]) -> array[Any]:
    if byteorder == "big":
        numbers.byteswap()
    return numbers
