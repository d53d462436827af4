"""On-policy distillation: a teacher scores the tokens that the student sampled.

    A_t = group advantage + weight * (log pi_teacher(y_t) - log pi_student(y_t))

With the second term, the policy gradient minimises each token's reverse KL divergence, KL(student
|| teacher), estimated at the sampled token. This is arXiv 2306.13649 with on-policy data, in the
form of "On-Policy Distillation" by Thinking Machines. The student's log-probability is the engine's
at sampling. The teacher is another adapter on the same base, or a model on a vLLM server.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from torch import Tensor

from stapo_lite.errors import InputError, RunError, explained
from stapo_lite.method.metrics import Mean, Metrics
from stapo_lite.method.tokens import Tokens
from stapo_lite.model.adapter import load_adapter
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.metrics import gather_metrics
from stapo_lite.training.run import Run
from stapo_lite.types import Completion, Rollouts

AT_ONCE = 16
"""Requests to a server at the same time."""
MAX_RETRIES = 5
"""Retries of a request by the client before the run ends."""
LOWEST = -30.0
"""Smaller log-probabilities count as this one: vLLM sends -9999 for a probability of 0."""


class Teacher(Callback):
    """Adds the teacher's term to the advantage of each token.

    Args:
        weight: factor on this term.
    """

    phase = Phase.MEASURE

    def __init__(self, weight: float):
        self._weight = weight
        self._parts: list[Metrics] = []

    def logprobs(self, run: Run, tokens: Tokens) -> Tensor:
        """The teacher's log-probabilities of a mini-batch's tokens, [N] fp32."""
        raise NotImplementedError

    def on_mini_batches(self, run: Run, batches: Sequence[Tokens]) -> None:
        for batch in batches:
            difference = self.logprobs(run, batch) - batch.rollout_logprobs
            difference = difference.where(batch.written, 0.0)  # a tool's results teach nothing
            batch.advantages += self._weight * difference
            self._parts.append({"teacher_kl": Mean.over(batch.written, -difference)})

    def on_step_end(self, run: Run, metrics: dict[str, Any], rollouts: Rollouts) -> None:
        metrics |= gather_metrics(self._parts)
        self._parts = []


class AdapterTeacher(Teacher):
    """Another adapter on the student's base, run by the trainer.

    Args:
        folder: an adapter with the student's rank, scale and layers.
    """

    def __init__(self, weight: float, folder: Path):
        super().__init__(weight)
        self._folder = folder

    def on_train_begin(self, run: Run) -> None:
        self._values = run.policy.copy_values()
        with run.policy.holding(self._values):
            load_adapter(run.policy.model, self._folder)  # into the copied values

    def logprobs(self, run: Run, tokens: Tokens) -> Tensor:
        with run.policy.holding(self._values):
            return run.learner.measure(tokens, range(len(tokens.completions))).logprobs


class ServerTeacher(Teacher):
    """The base model of a `vllm serve` or `stapo serve`, with the student's vocabulary. Its context
    must fit prompt, completion and one more token, which every request generates.

    Args:
        url: address of the server.
        key: API key, if the server asks for one.

    Raises:
        RunError: the server does not answer.
        InputError: when the run begins: another vocabulary, or too short a context.
    """

    def __init__(self, weight: float, url: str, key: str):
        super().__init__(weight)
        direct = DefaultHttpxClient(trust_env=False)  # no proxy gets the key
        self._client = OpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=MAX_RETRIES, http_client=direct
        )
        self._root = self._client.with_options(base_url=url)
        with explained(f"objective.teacher_server={url}: does not answer", kind=RunError):
            self._model = self._client.models.list().data[0].id

    def on_train_begin(self, run: Run) -> None:
        # Both must cut a text into the same tokens; otherwise the scores are of other tokens.
        text = run.tokenizer.decode(run.prompts[0].token_ids)
        request = {"model": self._model, "prompt": text, "add_special_tokens": False}
        answer: Any = self._root.post("/tokenize", cast_to=object, body=request)
        if answer["tokens"] != run.tokenizer(text, add_special_tokens=False).input_ids:
            raise InputError("objective.teacher_server: its model has another vocabulary")
        context = answer["max_model_len"]
        longest = run.config.max_sequence_length + 1
        if context < longest:
            raise InputError(f"objective.teacher_server: serves {context} tokens, {longest} needed")

    def logprobs(self, run: Run, tokens: Tokens) -> Tensor:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            scores = threads.map(self._score, tokens.completions)
            values = [value for of_completion in scores for value in of_completion]
        return tokens.rollout_logprobs.new_tensor(values)

    def _score(self, completion: Completion) -> list[float]:
        """The log-probability of each token of a completion."""
        ids = completion.prompt.token_ids + completion.token_ids
        with explained("objective.teacher_server: does not score", kind=RunError):
            answer: Any = self._client.completions.create(
                model=self._model, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0}
            )
            places = answer.choices[0].prompt_logprobs[len(completion.prompt.token_ids) :]
            pairs = zip(places, completion.token_ids, strict=True)
            return [max(place[str(token)]["logprob"], LOWEST) for place, token in pairs]
