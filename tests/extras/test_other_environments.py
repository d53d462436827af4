"""The modules of docs/environments.md, with the real packages, in a chat whose model follows a
script."""

import re
import sys
import threading
from dataclasses import replace

import anyio
import pytest
import test_tools
from helpers import module_of_the_page
from test_tools import make_chat, talk

PAGE = "environments.md"
END = "<|im_end|>"


@pytest.fixture
def openenv_server():
    """A server whose number is 6; yields its address."""
    reason = "openenv is not installed"
    server = pytest.importorskip("openenv.core.env_server", reason=reason)
    import uvicorn

    class Guess(server.Action):
        number: int

    class Hint(server.Observation):
        text: str = ""

    class Numbers(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        steps = 0

        def reset(self, seed=None, episode_id=None, **options):
            return Hint(text="Guess my number, from 1 to 9.")

        def step(self, action, timeout_s=None, **options):
            self.steps += 1
            right = action.number == 6
            return Hint(text="no", done=right, reward=1 / self.steps if right else 0.0)

        @property
        def state(self):
            return server.State(step_count=self.steps)

    app = server.create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=2)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started and thread.is_alive():
        threading.Event().wait(0.02)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


def test_an_openenv_server_plays_with_the_model(tiny_model, openenv_server):
    names = module_of_the_page(PAGE, "guess.py", ("http://127.0.0.1:8000", openenv_server))
    chat = make_chat(tiny_model)
    for _ in range(3):  # more than the server has sessions
        completion, read = talk(chat, names["play"], f"It is 3.{END}", f"6{END}")
    assert "from 1 to 9." in read[0]
    assert names["reward"]([completion], **{"reward": [completion.prompt.columns["reward"]]}) == [
        0.5
    ]
    assert names["rows"]()[0].keys() == {"prompt"}


@pytest.fixture
def capitals(tmp_path, monkeypatch):
    """An environment of verifiers, with a user of two turns."""
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed")
    (tmp_path / "capitals.py").write_text(
        """
import verifiers.v1 as vf

__all__ = ["Capitals", "Conversation"]
TOWNS = {"France": "Paris", "Italy": "Rome"}

class Data(vf.TaskData):
    answer: str

class Capital(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def named(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

class Conversation(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Sure?")

class Capitals(vf.Taskset[Capital, vf.TasksetConfig]):
    def load(self):
        for index, (country, town) in enumerate(TOWNS.items()):
            prompt = f"What is the capital of {country}?"
            data = Data(idx=index, prompt=prompt, system_prompt="Be brief.", answer=town)
            yield Capital(data, self.config.task)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "capitals"
    sys.modules.pop("capitals", None)


def test_rows_and_rewards_of_verifiers(capitals):
    names = module_of_the_page(PAGE, "words.py", ("reverse_text", capitals))
    first, second = names["rows"]()
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert second["prompt"][1]["content"] == "What is the capital of Italy?"
    answers = [[{"role": "assistant", "content": text}] for text in ("Paris.", "Paris.")]
    assert anyio.run(names["reward"], answers, [0, 1]) == [2.0, 0.0]


def test_a_conversation_of_verifiers(capitals, tiny_model, monkeypatch):
    names = module_of_the_page(PAGE, "seat.py", ("alphabet_sort", capitals))
    row = names["rows"]()[1]
    prompt = replace(test_tools.ROW, prompt=row["prompt"], columns={"number": row["number"]})
    monkeypatch.setattr(test_tools, "ROW", prompt)
    completion, read = talk(make_chat(tiny_model), names["play"], f"Milan{END}", f"Rome{END}")
    assert re.search("Be brief.*the capital of Italy", read[0], re.DOTALL)
    assert "Sure?" in read[1]
    assert completion.prompt.columns["reward"] == 2.0
