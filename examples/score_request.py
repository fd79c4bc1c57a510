r"""A service that scores a web request by the features of its address and URL, and by its own arguments.

    PYTHONPATH=examples scripts/run mapstate serve sqlite:///features.db --functions score_request
    curl -d '{"address": "192.0.2.1", "url": "/login", "bytes": 512}' http://127.0.0.1:8080/drpc/score

answers ``{"result": {"score": 2, "why": ["burst", "new pace"]}}``. examples/access_log_features.py keeps the features.
All features of one call are as of one batch of each state. A real service asks a model instead of `_why`.
"""

from __future__ import annotations

import json
from typing import Any

from mapstate.errors import UsageError

_NOTHING = {f"{field}_{window}": 0 for field in ("requests", "bytes") for window in ("5_minutes", "1_day", "lifetime")}


def _why(size: int, address: dict[str, Any], url: dict[str, Any]) -> list[str]:
    """What is unusual about a request."""
    unusual = {
        "new address": address["requests_lifetime"] == 0,
        "burst": address["requests_5_minutes"] > 20,
        "new pace": address["requests_5_minutes"] * 2 > address["requests_1_day"],
        "large": size * url["requests_lifetime"] > 10 * (url["bytes_lifetime"] or 0),
    }
    return [name for name, applies in unusual.items() if applies]


def score(states: Any, args: str) -> dict[str, Any]:
    """The score of one request, which `mapstate serve` calls for ``POST /drpc/score``."""
    try:
        request = json.loads(args)
        address, url, size = request["address"], request["url"], int(request["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"a request has address, url and bytes: {error!r}") from error
    of_address = states["features_by_address"].get(address) or _NOTHING
    of_url = states["features_by_url"].get(url) or _NOTHING
    why = _why(size, of_address, of_url)
    return {"score": len(why), "why": why}
