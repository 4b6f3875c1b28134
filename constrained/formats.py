"""String formats of JSON Schema as patterns, where the engine's own are too wide.

The engine's `date` takes the 30th of February, its `time` a leap second at any minute, its
`hostname` and `email` have no limit of length. The patterns here never take more than the format
(RFC 3339, RFC 1123, RFC 5321). Rare forms are left out: quoted local parts, and leap seconds with
an offset other than Z, whose hour and minute would have to match it (either takes tens of
milliseconds to compile), and internationalised labels (`xn--`), whose Punycode no pattern decodes.
The engine's `ipv6` has no IPv4 part after a group and `::`. To check every such text as it closes
would hold back all of them for the sake of these.
"""

from __future__ import annotations

_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = (
    "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"  # Gregorian
)
_DATE = f"(?:[0-9]{{4}}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_OFFSET = f"(?:[Zz]|[+-]{_HOUR_MINUTE})"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}{_OFFSET}"
_LEAP_SECOND = f"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"

_ALNUM = "[A-Za-z0-9]"
_ALNUM_OR_HYPHEN = "[A-Za-z0-9-]"
# Up to 63 characters, no hyphen at the ends, not both the third and the fourth a hyphen.
_LABEL = (
    f"(?:{_ALNUM}|{_ALNUM}{_ALNUM}|{_ALNUM}{_ALNUM_OR_HYPHEN}"
    f"(?:{_ALNUM}|{_ALNUM}{_ALNUM}|-{_ALNUM}"
    f"|(?:{_ALNUM}{_ALNUM_OR_HYPHEN}|-{_ALNUM}){_ALNUM_OR_HYPHEN}{{0,58}}{_ALNUM}))"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

# Format -> patterns that must all match.
PATTERNS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^(?:{_TIME}|{_LEAP_SECOND})$",),
    "date-time": (f"^(?:{_DATE}[Tt]{_TIME}|[0-9]{{4}}-(?:06-30|12-31)[Tt]{_LEAP_SECOND})$",),
    "hostname": (f"^{_HOSTNAME}$", "^.{1,253}$"),
    "email": (rf"^{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}$", "^[^@]{1,64}@[^@]{1,253}$"),
}

# The engine's own, found right.
ENGINE = frozenset(("duration", "ipv4", "ipv6", "uri", "uuid"))

# Defined by the specifications, and not enforced by anything here. Any other name is an
# annotation by definition.
UNENFORCED = frozenset(
    "idn-email idn-hostname iri iri-reference json-pointer regex relative-json-pointer "
    "uri-reference uri-template".split()
)
