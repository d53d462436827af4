"""The token log: what became of S2T's candidates in each step, and where tokens lie in the probability-entropy plane.

It takes no pass of its own: what it notes is computed anyway while the policy trains, except for the alternatives of a
candidate, for which the LM head computes one more row. `tools/audit.py` draws it.

    tokens.jsonl      one candidate a line: in its context, with alternatives
    quadrants.jsonl   one step a line: thresholds; tokens and mean of gradient norm / A in each quadrant; points
"""

import heapq
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.files import append_lines
from stapo_lite.model.policy import Policy
from stapo_lite.training.tracking import QUADRANTS_FILE, TOKENS_FILE
from stapo_lite.types import TokenStatistics

QUADRANTS = ("rare, sure", "rare, unsure", "likely, sure", "likely, unsure")
"""pi < tau_p or not; H < tau_h or not. S2T silences the first."""
ALTERNATIVES = 5
CONTEXT = 40
"""Tokens shown before and after a candidate."""


class TokenLog:
    """Notes the tokens of a step while it trains and writes them at its end, on the main process.

    Args:
        tokens_per_step: most candidates, and most points of the plane, that a step writes. Of more candidates a
            random share is written, the same for any number of processes.
    """

    def __init__(self, folder: Path, tokens_per_step: int, policy: Policy, tokenizer: Any, accelerator: Accelerator):
        self._folder = folder
        self._limit = tokens_per_step
        self._policy, self._tokenizer, self._accelerator = policy, tokenizer, accelerator
        self._begin_step()

    def _begin_step(self) -> None:
        self._candidates: list[tuple[float, dict[str, Any]]] = []
        self._points: list[list[float]] = []
        self._sums = torch.zeros(2, len(QUADRANTS), dtype=torch.float64, device=self._policy.device)
        self._thresholds: list[float] = []

    def begin(self, batch: MiniBatch) -> None:
        """Begin a mini-batch, or begin it again."""
        self._batch = batch
        # Lots, places in [N] and hidden states of each micro-batch.
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        # Another salt than the `random` ablation's, whose numbers decide what is silenced.
        self._lots = batch.random_scores([~completion.adapter_version for completion in batch.completions])

    def see(self, tokens: Tensor, hidden: Tensor, candidates: Tensor) -> None:
        """Keep the hidden states of a micro-batch's candidates: always the same number, so that the host need not wait
        for the device to count them.

        Args:
            tokens: [n] int64, places in [N].
            hidden: [n, D], from `Policy.hidden_states`.
            candidates: [n] bool.
        """
        lots = self._lots[tokens].masked_fill(~candidates, torch.inf)  # infinite ones fill up
        lowest = lots.topk(min(self._limit, len(lots)), largest=False).indices
        self._seen.append((lots[lowest], tokens[lowest], hidden[lowest]))

    def note(
        self,
        statistics: TokenStatistics,
        gradient_norms: Tensor,
        keep: Tensor,
        spurious: Tensor,
        tau_p: float,
        tau_h: float | None,
    ) -> None:
        """Note a mini-batch of which `see` saw every micro-batch.

        Args:
            statistics: [N], those that the tokens were judged by.
            gradient_norms: [N] fp32, of tokens with an advantage.
            keep, spurious: [N] bool.
        """
        batch = self._batch
        values = torch.stack([statistics.logprobs.exp(), statistics.entropy, gradient_norms], 1)
        positive = (batch.loss_mask & (batch.advantages > 0)).nonzero()[:, 0]
        self._points += values[thin(positive, self._limit)].tolist()
        if tau_h is not None:  # without candidates there is nothing to note, and no quadrant
            self._thresholds.append(tau_h)
            quadrant = 2 * (statistics.logprobs >= math.log(tau_p)) + (statistics.entropy.double() >= tau_h)
            norms = (gradient_norms / batch.advantages)[positive]  # at equal advantages
            self._sums.index_add_(1, quadrant[positive], torch.stack([torch.ones_like(norms), norms]).double())
            if self._seen:
                self._note_candidates(values, torch.stack([keep, spurious], 1), tau_h)
        del self._batch, self._lots, self._seen  # the card's memory, until the next update

    def _note_candidates(self, values: Tensor, flags: Tensor, tau_h: float) -> None:
        """Write down context and alternatives of what was seen."""
        lots, tokens, hidden = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        drawn = lots.topk(min(self._limit, int(lots.isfinite().sum())), largest=False).indices
        if not len(drawn):
            return
        lots, tokens = lots[drawn], tokens[drawn]
        ids, shares = self._policy.top_tokens(hidden[drawn], ALTERNATIVES)
        columns = (lots, tokens, self._batch.rows[tokens], values[tokens], flags[tokens], ids, shares)
        for lot, token, row, numbers, (kept, is_spurious), *best in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            completion = self._batch.completions[row]
            t = token - self._batch.starts[row]
            text = completion.prompt.token_ids + completion.token_ids
            at = len(completion.prompt.token_ids) + t
            candidate = {
                "token": [text[at]],
                "token_id": text[at],
                "position": t,
                "before": text[max(0, at - CONTEXT) : at],
                "after": text[at + 1 : at + 1 + CONTEXT],
                **dict(zip(("probability", "entropy", "gradient_norm"), map(_short, numbers), strict=True)),
                "advantage": _short(completion.advantage),
                "tau_h": _short(tau_h),
                "kept": kept,
                "spurious": is_spurious,
                "alternatives": list(zip(*best, strict=True)),
            }
            self._candidates.append((lot, candidate))
        self._candidates = self._draw(self._candidates)

    def write(self, step: int, tau_p: float) -> None:
        """Append what was noted to the files; every process takes part."""
        candidates, points, thresholds = (
            gather_object(part) for part in (self._candidates, self._points, self._thresholds)
        )
        counts, sums = self._accelerator.reduce(self._sums, "sum").tolist()
        if self._accelerator.is_main_process:
            drawn = [{"step": step} | self._readable(line) for _, line in self._draw(candidates)]
            append_lines(self._folder / TOKENS_FILE, drawn)
            line = {
                "step": step,
                "tau_p": tau_p,
                "tau_h": sum(thresholds) / len(thresholds) if thresholds else None,
                "tokens": [int(count) for count in counts],
                "gradient_norm": [_short(s / n) if n else None for s, n in zip(sums, counts, strict=True)],
                "points": [[_short(value) for value in point] for point in thin(points, self._limit)],
            }
            append_lines(self._folder / QUADRANTS_FILE, [line])
        self._begin_step()

    def _draw(self, candidates: list[tuple[float, dict[str, Any]]]) -> list[tuple[float, dict[str, Any]]]:
        return heapq.nsmallest(self._limit, candidates, key=itemgetter(0))

    def _readable(self, line: dict[str, Any]) -> dict[str, Any]:
        """Text in place of token ids."""
        ids, shares = zip(*line["alternatives"], strict=True)
        token, before, after, *texts = self._tokenizer.batch_decode(
            [line["token"], line["before"], line["after"], *([i] for i in ids)]
        )
        alternatives = [[text, _short(share)] for text, share in zip(texts, shares, strict=True)]
        return line | {"token": token, "before": before, "after": after, "alternatives": alternatives}


def thin(values: Any, limit: int) -> Any:
    """At most `limit` of a list's or tensor's elements, evenly spaced."""
    return values[:: math.ceil(len(values) / limit) or 1]


def _short(value: float) -> float:
    """Four significant digits, for the file's sake."""
    return float(f"{value:.4g}")
