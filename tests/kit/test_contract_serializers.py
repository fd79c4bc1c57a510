"""The contract of a wire format, on both that there are."""

from __future__ import annotations

import pytest

from mapstate.serializers import JsonSerializer, MessagePackSerializer
from mapstate.testing.contracts import SerializerContract


class TestJson(SerializerContract):
    @pytest.fixture
    def serializer(self):
        return JsonSerializer()


class TestMessagePack(SerializerContract):
    @pytest.fixture
    def serializer(self):
        return MessagePackSerializer()
