"""Who may ask: API keys as a dependency of every route."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from .errors import ApiError


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose request it is: prefixes and ids are shared among one owner's requests only."""

    name: str  # "" when the server has no keys; else a digest of the key
    is_admin: bool = False

    @property
    def namespace(self) -> tuple[str, ...]:
        return ("key", self.name) if self.name else ()

    @property
    def may_flush_all(self) -> bool:
        """Where there are no keys, everybody may."""
        return self.is_admin or not self.name


class KeyRing:
    """The accepted keys, as digests; the keys themselves are not kept.

    Those of admins may do what others may, and act on the whole server.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()):
        # A header is bytes; clients send what is not ASCII as UTF-8 or as Latin-1.
        self._digests: list[tuple[bytes, Owner]] = []
        for key in dict.fromkeys((*keys, *admin_keys)):
            name = hashlib.sha256(key.encode()).hexdigest()[:16]
            spellings = {key.encode()}
            if all(ord(c) < 256 for c in key):
                spellings.add(key.encode("latin-1"))
            owner = Owner(name, is_admin=key in admin_keys)
            self._digests += [(hashlib.sha256(s).digest(), owner) for s in sorted(spellings)]

    def owner(self, scope: Scope) -> Owner:
        """Who sent the request, by its Authorization header alone.

        Raises:
            ApiError: 401, the same for every wrong, missing, doubled or malformed header.
        """
        if not self._digests:
            return Owner("")
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, given = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(given).digest()
        found: Owner | None = None
        for known, owner in self._digests:  # all of them: the time must not tell which one fits
            if hmac.compare_digest(digest, known):
                found = owner
        if found is None or scheme.lower() != b"bearer":
            raise ApiError(
                401,
                "an API key is needed: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found
