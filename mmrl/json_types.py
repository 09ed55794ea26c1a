"""Types of JSON data: what `json.loads` returns, what records, metrics and endpoints hold."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JsonScalar: TypeAlias = bool | int | float | str | None
# The containers are read-only, so that a `dict[str, int]` is JSON data too.
Json: TypeAlias = "JsonScalar | Sequence[Json] | Mapping[str, Json]"
JsonObject: TypeAlias = Mapping[str, Json]
