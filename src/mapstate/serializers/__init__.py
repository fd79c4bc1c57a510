"""Wire formats, by name, and the codec that puts records into them."""

from mapstate.serializers.formats import JsonSerializer, MessagePackSerializer, serializer
from mapstate.serializers.native import NativeSerializer
from mapstate.serializers.serializer import RecordCodec, Serializer

__all__ = ["JsonSerializer", "MessagePackSerializer", "NativeSerializer", "RecordCodec", "Serializer", "serializer"]
