"""The token log: what became of S2T's candidates in each step, and where tokens lie in the
probability-entropy plane.

Training computes all of it anyway, except a candidate's alternatives: at the end of a step, each
logged candidate's prefix runs once more through the policy that the step began with. `page.py`
draws the log.

    tokens.jsonl      one line per candidate: in context, with alternatives
    quadrants.jsonl   one line per step: thresholds; number of tokens and mean of gradient norm / A
                      in each quadrant; points
"""

import heapq
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch, pack
from stapo_lite.files import append_lines
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.folder import QUADRANTS_FILE, TOKENS_FILE
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Prompt, Rollouts, TokenDetails, Update

QUADRANTS = ("rare, sure", "rare, unsure", "likely, sure", "likely, unsure")
"""pi < tau_p or not; H < tau_h or not. S2T silences the first."""
ALTERNATIVES = 5
CONTEXT = 40
"""Tokens shown before and after a candidate."""

Candidate = dict[str, Any]


class TokenLog(Callback):
    """Collects tokens during a step; the main process writes them at its end.

    Args:
        tokens_per_step: most candidates, and most points of the plane, written per step. If there
            are more candidates, a random subset is written, the same for any number of processes.
    """

    def __init__(self, tokens_per_step: int):
        self._limit = tokens_per_step
        self._begin_step()

    def _begin_step(self) -> None:
        self._candidates: list[tuple[float, Candidate]] = []
        self._points: list[list[float]] = []
        self._sums = torch.zeros(2, len(QUADRANTS), dtype=torch.float64)

    def on_update(self, run: Run, batch: MiniBatch, update: Update) -> None:
        tokens, tau_h = update.tokens, update.tau_h
        if tokens is None:
            return
        logprobs, entropy, _ = tokens.statistics
        values = torch.stack([logprobs.exp(), entropy, tokens.gradient_norm], 1)
        positive = (batch.loss_mask & (batch.advantages > 0)).nonzero()[:, 0]
        self._points += values[thin(positive, self._limit)].tolist()
        if tau_h is None:  # without candidates there are no quadrants
            return
        likely = logprobs >= math.log(run.progress.tau_p)
        unsure = entropy.double() >= tau_h
        quadrant = 2 * likely + unsure  # index into QUADRANTS
        norms = (tokens.gradient_norm / batch.advantages)[positive]  # at equal advantages
        counted = torch.stack([torch.ones_like(norms), norms]).double().cpu()
        self._sums.index_add_(1, quadrant[positive].cpu(), counted)
        self._note_candidates(batch, tokens, values, tau_h)

    def _note_candidates(
        self, batch: MiniBatch, tokens: TokenDetails, values: Tensor, tau_h: float
    ) -> None:
        """Draw some of a mini-batch's candidates and store them in context."""
        places = tokens.candidate.nonzero()[:, 0]
        # Not the salt of the `random` ablation, whose scores decide what is silenced.
        salts = [~completion.adapter_version for completion in batch.completions]
        lots = batch.random_scores(salts)[places]
        drawn = lots.topk(min(self._limit, len(lots)), largest=False).indices
        places = places[drawn]
        flags = torch.stack([tokens.keep, tokens.spurious], 1)[places]
        given = torch.stack([lots[drawn], batch.advantages[places]], 1)
        columns = (given, places, batch.rows[places], values[places], flags)
        for (lot, advantage), place, row, numbers, (kept, spurious) in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            candidate = in_context(batch.completions[row], place - batch.starts[row], advantage)
            names = ("probability", "entropy", "gradient_norm")
            candidate |= dict(zip(names, map(_short, numbers), strict=True))
            candidate |= {"tau_h": _short(tau_h), "kept": kept, "spurious": spurious}
            self._candidates.append((lot, candidate))
        self._candidates = self._draw(self._candidates)

    def _draw(self, candidates: list[tuple[float, Candidate]]) -> list[tuple[float, Candidate]]:
        return heapq.nsmallest(self._limit, candidates, key=itemgetter(0))

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        step = metrics["step"]
        candidates, points = gather_object(self._candidates), gather_object(self._points)
        sums = run.learner.reduce(self._sums.to(run.policy.device))
        self._begin_step()
        if not run.accelerator.is_main_process:
            return
        drawn = [candidate for _, candidate in self._draw(candidates)]
        add_alternatives(run, drawn)
        lines = [{"step": step} | readable(candidate, run.tokenizer) for candidate in drawn]
        append_lines(run.folder / TOKENS_FILE, lines)
        counts, norms = sums.tolist()
        line = {
            "step": step,
            "tau_p": metrics["tau_p"],
            "tau_h": metrics["tau_h"],
            "tokens": [int(count) for count in counts],
            "gradient_norm": [
                _short(norm / count) if count else None
                for norm, count in zip(norms, counts, strict=True)
            ],
            "points": [[_short(value) for value in p] for p in thin(points, self._limit)],
        }
        append_lines(run.folder / QUADRANTS_FILE, [line])


def in_context(completion: Completion, position: int, advantage: float) -> Candidate:
    """A token of a completion with what comes before and after it, as token ids.

    Args:
        position: index in the completion.
    """
    text = completion.prompt.token_ids + completion.token_ids
    at = len(completion.prompt.token_ids) + position
    return {
        "token": [text[at]],
        "token_id": text[at],
        "position": position,
        "before": text[max(0, at - CONTEXT) : at],
        "after": text[at + 1 : at + 1 + CONTEXT],
        "beginning": text[:at],
        "advantage": _short(advantage),
    }


@torch.no_grad()
def add_alternatives(run: Run, candidates: Sequence[Candidate]) -> None:
    """Add the most probable tokens at each candidate's position, by the policy before the step."""
    if not candidates:
        return
    policy = run.policy
    completions = [
        Completion(Prompt("", c["beginning"], None), c["token"], [0.0], False, 0)
        for c in candidates
    ]
    batch = pack(completions, policy.device)
    before = {name: value.to(policy.device) for name, value in run.snapshot.adapter.items()}

    def find(micro_batches: list[list[int]]) -> None:
        for rows in micro_batches:
            hidden = policy.hidden_states(batch.select(rows))
            ids, shares = policy.top_tokens(hidden, ALTERNATIVES)
            for row, *best in zip(rows, ids.tolist(), shares.tolist(), strict=True):
                candidates[row]["alternatives"] = list(zip(*best, strict=True))

    with policy.holding(before):
        run.learner.budget.fit(batch, range(len(completions)), find)


def readable(candidate: Candidate, tokenizer: Any) -> Candidate:
    """A candidate as a line of the log, with token ids decoded to text."""
    ids, shares = zip(*candidate["alternatives"], strict=True)
    parts = [candidate[name] for name in ("token", "before", "after")]
    token, before, after, *texts = tokenizer.batch_decode([*parts, *([i] for i in ids)])
    line = {name: value for name, value in candidate.items() if name != "beginning"}
    line |= {"token": token, "before": before, "after": after}
    shown = zip(texts, map(_short, shares), strict=True)
    return line | {"alternatives": [list(pair) for pair in shown]}


def thin(values: Any, limit: int) -> Any:
    """At most `limit` evenly spaced elements of a list or tensor."""
    return values[:: math.ceil(len(values) / limit) or 1]


def _short(value: float) -> float:
    """Round to four significant digits, to keep files small."""
    return float(f"{value:.4g}")
