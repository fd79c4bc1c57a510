"""Wire formats, by name, and the codec that puts records into them."""

from mapstate.errors import ConfigurationError
from mapstate.serializers.json import JsonSerializer
from mapstate.serializers.msgpack import MessagePackSerializer
from mapstate.serializers.native import NativeSerializer
from mapstate.serializers.serializer import RecordCodec, Serializer

__all__ = ["JsonSerializer", "MessagePackSerializer", "NativeSerializer", "RecordCodec", "Serializer", "serializer"]

_KINDS: tuple[type[Serializer], ...] = (JsonSerializer, MessagePackSerializer, NativeSerializer)
_BY_NAME = {kind.name: kind for kind in _KINDS}


def serializer(name: str) -> Serializer:
    """The serializer of this name, as a spec and a ledger give it. Raises ConfigurationError."""
    if name not in _BY_NAME:
        raise ConfigurationError(f"there is no serializer {name!r}; there is {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]()
