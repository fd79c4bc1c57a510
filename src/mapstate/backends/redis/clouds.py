"""Logins of managed Redis services, by the identity that a process has in its cloud.

    rediss+cluster://HOST:6379?credentials=mapstate.backends.redis.clouds:elasticache

Each process that connects calls a factory once: driver, executors' workers, readers and commands. Its provider is asked
for each new connection. The cloud's own library finds the identity, signs or fetches a token, and renews it in time.
Nothing of it is in the URL or in a task. docs/operating.md#a-login-of-a-cloud.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import urlencode

from redis.credentials import CredentialProvider

from mapstate.errors import ConfigurationError, missing_driver

_TOKEN_SECONDS = 900  # for which a token of AWS opens connections: the most that its services take


class TokenLogin(CredentialProvider):
    """Logs in with a token that is asked for each time, and the user's name where the service needs one."""

    def __init__(self, token: Callable[[], str], user: str | None = None) -> None:
        self._token = token
        self._user = user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """``(token,)`` or ``(user, token)``. Raises what the service's library does."""
        token = self._token()
        return (token,) if self._user is None else (self._user, token)


def elasticache() -> CredentialProvider:
    """AWS ElastiCache with IAM: the user of MAPSTATE_REDIS_USER in the replication group of MAPSTATE_REDIS_CACHE."""
    return _signed_by_aws("elasticache")


def elasticache_serverless() -> CredentialProvider:
    """`elasticache` where MAPSTATE_REDIS_CACHE names a serverless cache."""
    return _signed_by_aws("elasticache", ResourceType="ServerlessCache")


def memorydb() -> CredentialProvider:
    """AWS MemoryDB with IAM: the user of MAPSTATE_REDIS_USER in the cluster of MAPSTATE_REDIS_CACHE."""
    return _signed_by_aws("memorydb")


def memorystore() -> CredentialProvider:
    """Google Memorystore with IAM: an access token of the application default credentials. It needs no user's name."""
    try:
        import google.auth
        from google.auth.transport.requests import Request
    except ModuleNotFoundError as error:
        raise missing_driver("a login of Google's cloud", error, extra="gcp") from error
    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])

    def token() -> str:
        if not credentials.valid:  # some minutes before it expires, too
            credentials.refresh(Request())  # type: ignore[no-untyped-call]
        return str(credentials.token)

    return TokenLogin(token)


def entra() -> CredentialProvider:
    """Azure's managed Redis with Entra ID: MAPSTATE_REDIS_USER is the identity's object (principal) ID."""
    try:
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise missing_driver("a login of Azure", error, extra="azure") from error
    credential = DefaultAzureCredential()  # keeps a token until some minutes before it expires
    return TokenLogin(lambda: credential.get_token("https://redis.azure.com/.default").token, _setting("USER"))


def _signed_by_aws(service: str, **more: str) -> CredentialProvider:
    """A token is a signed request that nobody sends: signing asks no server, so each connection gets a new one."""
    try:
        from botocore.model import ServiceId
        from botocore.session import get_session
        from botocore.signers import RequestSigner
    except ModuleNotFoundError as error:
        raise missing_driver("a login of AWS", error, extra="aws") from error
    user, cache = _setting("USER"), _setting("CACHE").lower()
    session = get_session()
    region = session.get_config_variable("region")
    if not region:
        raise ConfigurationError("a login of AWS needs a region: set AWS_DEFAULT_REGION. Nothing was sent")
    events = session.get_component("event_emitter")
    address = f"https://{cache}/?{urlencode({'Action': 'connect', 'User': user} | more)}"

    def token() -> str:
        identity = session.get_credentials()  # it keeps one, and looks again while it has none
        signer = RequestSigner(ServiceId(service), region, service, "v4", identity, events)
        request = {"method": "GET", "url": address, "body": {}, "headers": {}, "context": {}}
        signed = signer.generate_presigned_url(request, "connect", region_name=region, expires_in=_TOKEN_SECONDS)
        return str(signed).removeprefix("https://")

    return TokenLogin(token, user)


def _setting(name: str) -> str:
    value = os.environ.get(f"MAPSTATE_REDIS_{name}")
    if not value:
        raise ConfigurationError(
            f"the environment variable MAPSTATE_REDIS_{name} is not set: a login of a cloud needs it in each process. "
            "See docs/operating.md#a-login-of-a-cloud"
        )
    return value
