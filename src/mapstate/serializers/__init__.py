"""Wire formats, by name, and the codec that puts records into them."""

from mapstate.serializers.formats import JsonSerializer, MessagePackSerializer, NativeSerializer, serializer
from mapstate.serializers.serializer import RecordCodec, Serializer

__all__ = ["JsonSerializer", "MessagePackSerializer", "NativeSerializer", "RecordCodec", "Serializer", "serializer"]
