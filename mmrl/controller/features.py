"""The feature store of a controller: what its prompts were encoded to, once, and never leaves it (DESIGN 4)."""

from __future__ import annotations

from collections import Counter

from torch import Tensor


class FeatureStore:
    """Named groups of tensors with reference counts.

    ``hold`` and ``release`` bracket a use; what nobody holds stays as long as the byte budget allows, oldest use first
    out. This edition keeps everything in memory.
    """

    def __init__(self, budget_bytes: int = 2 << 30) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_by_kind: Counter[str] = Counter()
        self._features: dict[str, dict[str, Tensor]] = {}
        self._held: Counter[str] = Counter()

    def __contains__(self, key: str) -> bool:
        return key in self._features

    def __len__(self) -> int:
        return len(self._features)

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_kind.values())

    def put(self, key: str, features: dict[str, Tensor]) -> None:
        """Keep ``features`` under ``key``; idle ones are dropped to stay in the budget."""
        self.drop(key)
        self._features[key] = features
        for kind, tensor in features.items():
            self.bytes_by_kind[kind] += tensor.nbytes
        for idle in [k for k in self._features if not self._held[k] and k != key]:
            if self.bytes <= self.budget_bytes:
                return
            self.drop(idle)

    def get(self, key: str) -> dict[str, Tensor]:
        """The features of ``key``, marked as just used. Raises ``KeyError`` where they were never put or dropped."""
        features = self._features[key] = self._features.pop(key)
        return features

    def hold(self, keys: list[str]) -> None:
        self._held.update(keys)

    def release(self, keys: list[str]) -> None:
        self._held.subtract(keys)
        self._held += Counter()

    def drop(self, key: str) -> None:
        for kind, tensor in self._features.pop(key, {}).items():
            self.bytes_by_kind[kind] -= tensor.nbytes
