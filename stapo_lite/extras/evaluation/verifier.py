"""A second judge: a small language model on a server reads the answers that the rules reject."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from openai import OpenAI

from stapo_lite.errors import RunError, explained
from stapo_lite.rollout.engine import progress_bar

INSTRUCTION = """\
You grade the final answer of a candidate. The standard answer is right; do not solve the problem yourself. Compare \
only the candidate's final answer with it: another form of the same value or expression is right, a part of several \
required answers is not, and neither is an answer that is missing or cut off.

Problem:
{problem}

Standard answer:
{gold}

End of the candidate's response:
{response}

Reply with one letter: A if the candidate's final answer is correct, B if it is incorrect, C if there is none.
"""  # noqa: E501
RESPONSE_END = 10_000
"""Characters at the end of a response that the verifier reads."""
AT_ONCE = 16
"""Requests at the same time."""
MAX_RETRIES = 5
"""Retries of a request by the client before the evaluation ends."""


def verify(samples: Sequence[dict[str, Any]], url: str) -> str:
    """Ask a server about each answer that is not `correct`, and set its `accepted_by_verifier`;
    return the name of the server's model.

    Args:
        samples: as `samples.grade` returns them. Those without an answer are not shown.

    Raises:
        RunError: the server fails.
    """
    rejected = [s for s in samples if s["answer"] is not None and not s["correct"]]
    client = OpenAI(
        base_url=f"{url}/v1",
        api_key=os.environ.get("VLLM_API_KEY", "none"),
        max_retries=MAX_RETRIES,
    )
    fix = "; the samples are kept: go on with the same command"
    failed = explained(f"verifier_server={url} fails", fix=fix, kind=RunError)
    with failed, ThreadPoolExecutor(AT_ONCE) as threads:
        model = client.models.list().data[0].id
        letters = threads.map(partial(judge, client, model), rejected)
        bar = progress_bar("verify", "answer", len(rejected), letters)
        for sample, letter in zip(rejected, bar, strict=True):
            sample["accepted_by_verifier"] = letter == "A"
    return model


def judge(client: OpenAI, model: str, sample: dict[str, Any]) -> str:
    """The verifier's letter for a sample: the first token of its reply."""
    end = {"response": sample["response"][-RESPONSE_END:]}
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": INSTRUCTION.format_map(sample | end)}],
        temperature=0,
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    return str(answer.choices[0].message.content).strip()
