"""On-policy distillation: a teacher scores the tokens that the student sampled.

    A_t = group advantage + weight * (log pi_teacher(y_t) - log pi_student(y_t))

With the second term, the policy gradient minimises each token's reverse KL divergence, KL(student
|| teacher), estimated at the sampled token: arXiv 2306.13649 with on-policy data, in the form of
"On-Policy Distillation" by Thinking Machines. The student's log-probability is the engine's at
sampling. The teacher is another adapter on the same base, or a model on a vLLM server.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.errors import RunError, explained
from stapo_lite.model.loading import load_adapter
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.run import Run
from stapo_lite.training.update import measure
from stapo_lite.types import Completion, Rollouts

AT_ONCE = 16
"""Requests to a server at the same time."""
TIMEOUT = 600.0
"""Seconds that a request may take."""
ATTEMPTS, PAUSE = 4, 5.0
"""Attempts per request before the run ends, and the seconds between two."""


class Teacher(Callback):
    """Adds the teacher's term to the advantage of each token.

    Args:
        weight: factor on this term.
    """

    def __init__(self, weight: float):
        self._weight = weight
        self._kl = self._tokens = 0.0

    def logprobs(self, run: Run, batch: MiniBatch) -> Tensor:
        """The teacher's log-probabilities of a mini-batch's tokens, [N] fp32."""
        raise NotImplementedError

    def on_mini_batches(self, run: Run, batches: Sequence[MiniBatch]) -> None:
        for batch in batches:
            difference = self.logprobs(run, batch) - batch.rollout_logprobs
            difference = difference.where(batch.loss_mask, 0.0)
            batch.advantages += self._weight * difference
            self._kl -= difference.sum().item()
            self._tokens += batch.loss_mask.sum().item()

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        sums = torch.tensor([self._kl, self._tokens], device=run.accelerator.device)
        kl, tokens = run.accelerator.reduce(sums).tolist()
        metrics["teacher_kl"] = kl / tokens if tokens else None
        self._kl = self._tokens = 0.0


class AdapterTeacher(Teacher):
    """Another adapter on the student's base, run by the trainer.

    Args:
        folder: an adapter with the student's rank, scale and layers.
    """

    def __init__(self, weight: float, folder: Path):
        super().__init__(weight)
        self._folder = folder

    def on_train_begin(self, run: Run) -> None:
        parameters = run.policy.parameters
        self._values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with run.policy.holding(self._values):
            load_adapter(run.policy.model, self._folder)  # into these values

    def logprobs(self, run: Run, batch: MiniBatch) -> Tensor:
        with run.policy.holding(self._values):
            rows = range(len(batch.completions))
            return measure(run.policy, batch, rows, run.learner.budget).logprobs


class ServerTeacher(Teacher):
    """The base model of a `vllm serve` or `stapo serve`, with the student's vocabulary. Its context
    must fit prompt, completion and one more token, which every request generates.

    Args:
        url: address of the server.
        key: API key, if the server asks for one.

    Raises:
        RunError: it does not answer.
    """

    def __init__(self, weight: float, url: str, key: str):
        super().__init__(weight)
        self._url, self._key = url.rstrip("/"), key
        failed = f"objective.teacher_server={url}: does not say what it serves"
        with explained(failed, LookupError, TypeError, kind=RunError):
            self._model = self._ask("/v1/models")["data"][0]["id"]

    def logprobs(self, run: Run, batch: MiniBatch) -> Tensor:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            scores = threads.map(self._score, batch.completions)
            values = [value for of_completion in scores for value in of_completion]
        return batch.rollout_logprobs.new_tensor(values)

    def _score(self, completion: Completion) -> list[float]:
        """The log-probability of each token of a completion."""
        ids = completion.prompt.token_ids + completion.token_ids
        request = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = self._ask("/v1/completions", request)["choices"]
        scored = choice["prompt_logprobs"][len(completion.prompt.token_ids) :]
        return [
            one[str(token)]["logprob"]
            for one, token in zip(scored, completion.token_ids, strict=True)
        ]

    def _ask(self, path: str, content: dict[str, Any] | None = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)
        failed = f"objective.teacher_server={self._url}: does not score"
        broken = (OSError, HTTPException)
        with explained(failed, *broken, KeyError, ValueError, kind=RunError):
            for left in reversed(range(ATTEMPTS)):
                try:
                    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                        return json.load(answer)
                except urllib.error.HTTPError as error:
                    if error.code < 500 or not left:
                        raise OSError(error.read().decode(errors="replace")) from error
                except broken:
                    if not left:
                        raise
                time.sleep(PAUSE)
