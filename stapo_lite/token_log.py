"""The token log: what became of S2T's candidates in each step, and where tokens lie in the probability-entropy plane.

It takes no pass of its own: what it notes is at hand while the policy trains, but for the alternatives of a candidate,
which are one more row of the LM head. `audit.py` draws it.

    tokens.jsonl      one candidate a line: in its context, with alternatives
    quadrants.jsonl   one step a line: thresholds, tokens and their mean gradient norm in each quadrant, some points
"""

import itertools
import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from stapo_lite.files import Journal
from stapo_lite.policy import Policy
from stapo_lite.s2t import random_scores
from stapo_lite.tracking import QUADRANTS_FILE, TOKENS_FILE
from stapo_lite.types import Completion

QUADRANTS = ("rare, sure", "rare, unsure", "likely, sure", "likely, unsure")
"""pi < tau_p or not; H < tau_h or not. S2T silences the first."""
ALTERNATIVES = 5


class _Seen(NamedTuple):
    """A candidate of the mini-batch that trains."""

    lot: float
    """Those with the lowest are written where there are more candidates than fit."""
    completion: Completion
    t: int
    alternatives: list[tuple[int, float]]
    """Tokens and their probabilities."""


class TokenLog:
    """Notes the tokens of a step while it trains and writes them at its end, on the main process.

    Args:
        tokens_per_step: most candidates, and most points of the plane, that a step writes. Of more candidates a
            random share is written, the same for any number of processes.
        context: tokens shown before and after a candidate.
    """

    def __init__(
        self,
        folder: Path,
        tokens_per_step: int,
        context: int,
        policy: Policy,
        tokenizer: Any,
        accelerator: Accelerator,
    ):
        self._tokens, self._quadrants = Journal(folder / TOKENS_FILE), Journal(folder / QUADRANTS_FILE)
        self._limit, self._context = tokens_per_step, context
        self._policy, self._tokenizer, self._accelerator = policy, tokenizer, accelerator
        self._begin_step()

    def _begin_step(self) -> None:
        self._seen: list[_Seen] = []
        self._candidates: list[tuple[float, dict[str, Any]]] = []
        self._points: list[list[float]] = []
        self._sums = torch.zeros(2, len(QUADRANTS), dtype=torch.float64, device=self._policy.device)
        self._thresholds: list[float] = []

    def see(self, rows: Sequence[Completion], hidden: Tensor, candidates: Tensor) -> None:
        """Find the alternatives of a micro-batch's candidates.

        Args:
            hidden: [N, D], from `Policy.hidden_states`.
            candidates: [N] bool.
        """
        drawn: list[tuple[float, int, Completion, int]] = []
        masks = candidates.cpu().split([len(c.token_ids) for c in rows])
        for start, completion, mask in zip(_starts(rows), rows, masks, strict=True):
            places = mask.nonzero()[:, 0].tolist()
            if places:
                # Another salt than the `random` ablation's, whose numbers decide what is silenced.
                lots = random_scores(completion.token_ids, ~completion.adapter_version)[places].tolist()
                drawn += [(lot, start + t, completion, t) for lot, t in zip(lots, places, strict=True)]
        drawn = sorted(drawn, key=itemgetter(0))[: self._limit]
        if drawn:
            indices = torch.tensor([index for _, index, _, _ in drawn], device=hidden.device)
            ids, probabilities = self._policy.top_tokens(hidden[indices], ALTERNATIVES)
            for (lot, _, completion, t), *top in zip(drawn, ids.tolist(), probabilities.tolist(), strict=True):
                self._seen.append(_Seen(lot, completion, t, list(zip(*top, strict=True))))

    def forget(self) -> None:
        """What `see` saw of a mini-batch that is not made, or made again."""
        self._seen = []

    def note(
        self,
        completions: Sequence[Completion],
        logprobs: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        gradient_norms: Tensor,
        kept: Tensor,
        spurious: Tensor,
        tau_p: float,
        tau_h: float | None,
    ) -> None:
        """Note a mini-batch of which `see` saw every micro-batch.

        Args:
            logprobs, entropy, advantages, gradient_norms: [n] fp32, of every token of the completions.
            kept, spurious: [n] bool.
        """
        values = torch.stack([logprobs.exp(), entropy, gradient_norms], 1)
        positive = (advantages > 0).nonzero()[:, 0]
        self._points += values[thin(positive, self._limit)].tolist()
        if tau_h is None:  # without candidates there is nothing to note, and no quadrant
            return
        self._thresholds.append(tau_h)
        quadrant = 2 * (logprobs >= math.log(tau_p)) + (entropy.double() >= tau_h)
        norms = gradient_norms[positive]
        self._sums.index_add_(1, quadrant[positive], torch.stack([torch.ones_like(norms), norms]).double())

        starts = dict(zip(completions, _starts(completions), strict=True))
        indices = [starts[seen.completion] + seen.t for seen in self._seen]
        seen_values, flags = values[indices].tolist(), torch.stack([kept, spurious], 1)[indices].tolist()
        for (lot, completion, t, alternatives), numbers, flag in zip(self._seen, seen_values, flags, strict=True):
            text = completion.prompt.token_ids + completion.token_ids
            at = len(completion.prompt.token_ids) + t
            candidate = {
                "token_id": completion.token_ids[t],
                "position": t,
                "before": text[max(0, at - self._context) : at],
                "after": text[at + 1 : at + 1 + self._context],
                **dict(zip(("probability", "entropy", "gradient_norm"), numbers, strict=True)),
                "advantage": completion.advantage,
                "tau_h": tau_h,
                **dict(zip(("kept", "spurious"), flag, strict=True)),
                "alternatives": alternatives,
            }
            self._candidates.append((lot, candidate))
        self.forget()
        self._candidates = self._draw(self._candidates)

    def write(self, step: int, tau_p: float) -> None:
        """Append what was noted to the files; every process takes part."""
        candidates, points, thresholds = (
            gather_object(part) for part in (self._candidates, self._points, self._thresholds)
        )
        counts, sums = self._accelerator.reduce(self._sums, "sum").tolist()
        if self._accelerator.is_main_process:
            self._tokens.add({"step": step} | self._readable(line) for _, line in self._draw(candidates))
            line = {
                "step": step,
                "tau_p": tau_p,
                "tau_h": sum(thresholds) / len(thresholds) if thresholds else None,
                "tokens": [int(count) for count in counts],
                "gradient_norm": [_short(s / n) if n else None for s, n in zip(sums, counts, strict=True)],
                "points": [[_short(value) for value in point] for point in thin(points, self._limit)],
            }
            self._quadrants.add([line])
        self._begin_step()

    def flush(self) -> None:
        """Have all lines on the disk.

        Raises:
            OSError: they cannot be written.
        """
        self._tokens.sync()
        self._quadrants.sync()

    def _draw(self, candidates: list[tuple[float, dict[str, Any]]]) -> list[tuple[float, dict[str, Any]]]:
        return sorted(candidates, key=itemgetter(0))[: self._limit]

    def _readable(self, line: dict[str, Any]) -> dict[str, Any]:
        """Text in place of token ids."""
        ids, shares = zip(*line["alternatives"], strict=True)
        token, before, after, *texts = self._tokenizer.batch_decode(
            [[line["token_id"]], line["before"], line["after"], *([i] for i in ids)]
        )
        numbers = {name: _short(value) for name, value in line.items() if isinstance(value, float)}
        alternatives = [[text, _short(share)] for text, share in zip(texts, shares, strict=True)]
        text = {"token": token, "before": before, "after": after, "alternatives": alternatives}
        return {name: (numbers | text).get(name, value) for name, value in ({"token": token} | line).items()}


def _starts(completions: Sequence[Completion]) -> list[int]:
    """Where each begins when their tokens are put one after the other."""
    return [0, *itertools.accumulate(len(c.token_ids) for c in completions)][: len(completions)]


def thin(values: Any, limit: int) -> Any:
    """At most `limit` of a list's or tensor's elements, evenly spaced."""
    return values[:: math.ceil(len(values) / limit) or 1]


def _short(value: float) -> float:
    """Four significant digits, for the file's sake."""
    return float(f"{value:.4g}")
