"""The token log: what became of S2T's candidates in each step, and where tokens lie in the
probability-entropy plane.

Training computes all of it anyway, except a candidate's alternatives: at the end of a step, each
logged candidate's prefix runs once more through the policy that the step began with. `page.py`
draws the log.

`tokens.jsonl` has a line per candidate, in context and with alternatives, and lines of other tokens
with A > 0, of kind `other`: probability, entropy, gradient norm / A.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import gather_object

from stapo_lite.extras.audit.diagnostics import describe_tokens
from stapo_lite.files import append_lines
from stapo_lite.method.masks import random_column
from stapo_lite.method.tokens import Tokens, pack
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.folder import TOKENS_FILE
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Prompt, Rollouts, Update

ALTERNATIVES = 5
CONTEXT = 40
"""Tokens shown before and after a candidate."""

Candidate = dict[str, Any]


class TokenLog(Callback):
    """Collects tokens during a step; the main process writes them at its end.

    Args:
        tokens_per_step: most candidates, and most other tokens with A > 0, written per step. If
            there are more candidates, a random subset is written.
    """

    def __init__(self, tokens_per_step: int):
        self._limit = tokens_per_step
        self._candidates: list[tuple[float, Candidate]] = []
        self._others: list[Candidate] = []

    def on_update(self, run: Run, tokens: Tokens, update: Update) -> None:
        if update.outputs is None or update.masks is None:
            return
        details = describe_tokens(run.learner, tokens, update.masks, update.outputs)
        norms = details.gradient_norm / tokens.advantages  # at equal advantages
        values = torch.stack([details.logprobs.exp(), details.entropy, norms], 1)
        names = ("probability", "entropy", "gradient_norm")
        known = {"tau_h": details.tau_h, "kind": "other"}
        rewarded = tokens.written & (tokens.advantages > 0)
        others = (rewarded & ~details.kinds["candidate"]).nonzero()[:, 0]
        for numbers in values[thin(others, self._limit)].tolist():
            self._others.append(known | dict(zip(names, map(_short, numbers), strict=True)))
        places = details.kinds["candidate"].nonzero()[:, 0]
        # Not the salt of the `random` ablation, whose scores decide what is silenced.
        salts = [~completion.adapter_version for completion in tokens.completions]
        lots = random_column(tokens, salts)[places].tolist()
        for lot, place in heapq.nsmallest(self._limit, zip(lots, places.tolist(), strict=True)):
            owner = int(tokens.owner[place])
            candidate = in_context(tokens.completions[owner], place - tokens.starts[owner])
            numbers = map(_short, values[place].tolist())
            candidate |= known | dict(zip(names, numbers, strict=True))
            candidate["advantage"] = _short(tokens.advantages[place].item())
            candidate["kind"] = "silenced" if update.masks.silenced[place] else "kept"
            self._candidates.append((lot, candidate))

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        candidates, others = gather_object(self._candidates), gather_object(self._others)
        self._candidates, self._others = [], []
        if not run.accelerator.is_main_process:
            return
        drawn = [one for _, one in heapq.nsmallest(self._limit, candidates, key=itemgetter(0))]
        add_alternatives(run, drawn)
        lines = [readable(candidate, run.tokenizer) for candidate in drawn]
        lines += thin(others, self._limit)
        step = {"step": metrics["step"]}
        append_lines(run.folder / TOKENS_FILE, [step | line for line in lines])


def in_context(completion: Completion, position: int) -> Candidate:
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
    }


@torch.no_grad()
def add_alternatives(run: Run, candidates: Sequence[Candidate]) -> None:
    """Add the most probable tokens at each candidate's position, as ids and probabilities, by the
    policy before the step."""
    if not candidates:
        return
    policy = run.policy
    completions = [
        Completion(Prompt("", c.pop("beginning"), None), c["token"], [0.0], False, 0)
        for c in candidates
    ]
    tokens = pack(completions, policy.device, run.learner.config.objective)
    before = {name: value.to(policy.device) for name, value in run.snapshot.adapter.items()}

    def find(micro_batches: Iterable[list[int]]) -> None:
        for chosen in micro_batches:
            hidden = policy.hidden_states([completions[number] for number in chosen])
            ids, shares = policy.top_tokens(hidden, ALTERNATIVES)
            for number, *best in zip(chosen, ids.tolist(), shares.tolist(), strict=True):
                candidates[number]["alternatives"] = best

    with policy.holding(before):
        run.learner.budget.fit(tokens, range(len(completions)), find)


def readable(candidate: Candidate, tokenizer: Any) -> Candidate:
    """A candidate as a line of the log, with token ids decoded to text."""
    texts = {name: tokenizer.decode(candidate[name]) for name in ("token", "before", "after")}
    pairs = zip(*candidate["alternatives"], strict=True)
    shown = [(tokenizer.decode(token), _short(share)) for token, share in pairs]
    return candidate | texts | {"alternatives": shown}


def thin(values: Any, limit: int) -> Any:
    """At most `limit` evenly spaced elements of a list or tensor."""
    return values[:: math.ceil(len(values) / limit) or 1]


def _short(value: float) -> float:
    """Round to four significant digits, to keep files small."""
    return float(f"{value:.4g}")
