"""The token log: what became of S2T's candidates in each step, and where tokens lie in the
probability-entropy plane. `page.py` draws it.

`tokens.jsonl` has a line for each candidate, in context and with alternatives. Lines of kind
`other` are of other tokens with A > 0: probability, entropy, gradient norm / A.

Training computes all of this anyway, except the alternatives. At the end of a step, the text before
each logged candidate runs once more through the policy that the step began with.
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
from stapo_lite.training.callbacks import Callback, Phase
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
        tokens_per_step: limit of the candidates written per step, and of the other tokens. If
            there are more candidates, a random subset is written.
    """

    phase = Phase.RECORD

    def __init__(self, tokens_per_step: int):
        self._limit = tokens_per_step
        self._candidates: list[tuple[float, Candidate]] = []
        self._others: list[Candidate] = []

    def on_update(self, run: Run, tokens: Tokens, update: Update) -> None:
        if update.outputs is None or update.masks is None:
            return
        details = describe_tokens(run.learner, tokens, update.masks, update.outputs)
        columns = {
            "probability": details.logprobs.exp().cpu(),
            "entropy": details.entropy.cpu(),
            "gradient_norm": (details.gradient_norm / tokens.advantages).cpu(),  # for A = 1
        }

        def line(place: int, kind: str) -> Candidate:
            """The fields that every logged token has."""
            numbers = {name: _short(column[place].item()) for name, column in columns.items()}
            return {"tau_h": details.tau_h, "kind": kind} | numbers

        candidate = details.kinds["candidate"]
        rewarded = tokens.written & (tokens.advantages > 0)
        others = (rewarded & ~candidate).nonzero()[:, 0]
        for place in thin(others, self._limit).tolist():
            self._others.append(line(place, "other"))
        # Every candidate draws a lot, and the lowest lots of all processes are logged. The salt
        # differs from that of the `random` ablation, whose scores decide what is silenced.
        salts = [~completion.adapter_version for completion in tokens.completions]
        places = candidate.nonzero()[:, 0]
        lots = random_column(tokens, salts)[places].tolist()
        pairs = zip(lots, places.tolist(), strict=True)
        for lot, place in heapq.nsmallest(self._limit, pairs):
            kind = "silenced" if update.masks.silenced[place] else "kept"
            owner = int(tokens.owner[place])
            entry = in_context(tokens.completions[owner], place - tokens.starts[owner])
            entry |= line(place, kind)
            entry["advantage"] = _short(tokens.advantages[place].item())
            self._candidates.append((lot, entry))

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        candidates = gather_object(self._candidates)
        others = gather_object(self._others)
        self._candidates = []
        self._others = []
        if not run.accelerator.is_main_process:
            return
        lowest = heapq.nsmallest(self._limit, candidates, key=itemgetter(0))
        logged = [candidate for _, candidate in lowest]
        add_alternatives(run, logged)
        lines = [readable(candidate, run.tokenizer) for candidate in logged]
        lines += thin(others, self._limit)
        step = {"step": metrics["step"]}
        append_lines(run.folder / TOKENS_FILE, [step | line for line in lines])


def in_context(completion: Completion, position: int) -> Candidate:
    """A token of a completion with the tokens before and after it, as ids.

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
    completions = []  # of one token each, after all that came before it
    for candidate in candidates:
        prompt = Prompt("", candidate.pop("beginning"), None)
        completions.append(Completion(prompt, candidate["token"], [0.0], False, 0))
    tokens = pack(completions, policy.device, run.learner.settings.objective)
    before = {name: value.to(policy.device) for name, value in run.snapshot.adapter.items()}

    def find(micro_batches: Iterable[list[int]]) -> None:
        for chosen in micro_batches:
            hidden = policy.hidden_states([completions[number] for number in chosen])
            ids, shares = policy.top_tokens(hidden, ALTERNATIVES)
            for number, *best in zip(chosen, ids.tolist(), shares.tolist(), strict=True):
                candidates[number]["alternatives"] = best  # ids, and their probabilities

    with policy.holding(before):
        run.learner.budget.fit(tokens, range(len(completions)), find)


def readable(candidate: Candidate, tokenizer: Any) -> Candidate:
    """A candidate as a line of the log, with token ids decoded to text."""
    texts = {name: tokenizer.decode(candidate[name]) for name in ("token", "before", "after")}
    alternatives = []
    for token, probability in zip(*candidate["alternatives"], strict=True):
        alternatives.append((tokenizer.decode(token), _short(probability)))
    return candidate | texts | {"alternatives": alternatives}


def thin(values: Any, limit: int) -> Any:
    """At most `limit` evenly spaced elements of a list or tensor."""
    return values[:: math.ceil(len(values) / limit) or 1]


def _short(value: float) -> float:
    """Round to four significant digits, to keep files small."""
    return float(f"{value:.4g}")
