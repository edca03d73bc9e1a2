"""What the answers of a batch are made from: the row, the settings that apply to it, both models.

The three digests of it are a row's fingerprint. Neither the machine nor how it is used is part of
it, as threads and the number of rows at once are.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from specllama.batch_input import Entry
from specllama.batch_ledger import Fingerprint
from specllama.batch_rows import Defaults, Row, digest

_NOT_MADE = "-"  # in the fingerprint of a line that is no row


@dataclass(frozen=True)
class Recipe:
    """What answers are made from, besides the row.

    verifier: the rule of acceptance. models: a digest of both files. template: one of what makes
    prompts of messages. cache: types of the target's K and V cache.
    """

    defaults: Defaults
    verifier: str
    models: str
    template: str
    cache: tuple[str, str] = ("f16", "f16")

    def fingerprint(self, entry: Entry) -> Fingerprint:
        """Of a row, or of what is wrong with its line."""
        if entry.row is None:
            assert entry.error is not None
            error = [entry.error.code, entry.error.message, entry.error.id]
            return digest(error), _NOT_MADE, _NOT_MADE
        return entry.row.digest, digest(self._settings(entry.row)), self.models

    def _settings(self, row: Row) -> dict[str, Any]:
        defaults = self.defaults
        params = replace(defaults.params, logit_bias=dict(defaults.params.logit_bias))
        return {
            **asdict(params),
            **row.overrides,
            "max_tokens": self.max_tokens(row),
            "stop": self.stop(row),
            "seed": row.seed if row.seed is not None else defaults.seed,
            "ignore_eos": self.ignores_eos(row),
            "verifier": self.verifier,
            "template": self.template if row.messages else "",
            "cache": self.cache,
        }

    def max_tokens(self, row: Row) -> int | None:
        """Most tokens of a row's answer, None for no limit."""
        limit = row.max_tokens if row.max_tokens is not None else self.defaults.max_tokens
        return None if limit == -1 else limit

    def stop(self, row: Row) -> tuple[str, ...]:
        """The texts that end a row's answer."""
        return row.stop if row.stop is not None else self.defaults.stop

    def ignores_eos(self, row: Row) -> bool:
        """Whether the model cannot end the answer."""
        return row.ignore_eos if row.ignore_eos is not None else self.defaults.ignore_eos

    def seed(self, row: Row) -> int:
        """The seed of a row; -1 draws one."""
        seed = row.seed if row.seed is not None else self.defaults.seed
        return secrets.randbits(32) if seed == -1 else seed
