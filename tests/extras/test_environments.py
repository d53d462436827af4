"""Environments as TRL has them, in a chat whose model follows a script."""

import pickle
import shutil
from dataclasses import replace

import pytest
from helpers import run
from test_tools import ROW, make_chat, save_with_template, talk

from stapo_lite import Trainer
from stapo_lite.assemble import open_run
from stapo_lite.config import load_config
from stapo_lite.errors import InputError
from stapo_lite.extras.turns import tools
from stapo_lite.extras.turns.environments import Environments
from stapo_lite.files import read_lines, write_lines

CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {}}}}}\n</tool_call><|im_end|>'
END = "Good.<|im_end|>"


class Game:
    """Its number is the row's."""

    def __init__(self):
        self.tries = []

    def reset(self, prompt, answer, **columns):
        self.number = answer
        return f" Guess between 1 and {answer + 5}."

    def guess(self, number: int) -> str:
        """Guess it.

        Args:
            number: the guess
        """
        self.tries.append(number)
        return "right" if number == self.number else "wrong"

    def get_reward(self) -> float:
        return 1 / len(self.tries) if self.number in self.tries else 0.0


class Patient(Game):
    """A coroutine is as good, and an environment need not say anything first."""

    async def reset(self, **columns):
        super().reset(**columns)

    async def get_reward(self) -> float:
        return 5.0


def rewards_of(environments, completion):
    (function,) = environments.rewards.values()
    return function(environments=[completion.prompt.live["environments"]], other=[1])


def test_an_episode_in_an_environment(tiny_model):
    environments = Environments(Game)
    script = [CALL.format(3), CALL.format(12), END]
    completion, read = talk(make_chat(tiny_model), environments, *script)
    assert "What is 3 * 4? Guess between 1 and 17.<|im_end|>" in read[0]  # the row's prompt
    assert '"name": "guess"' in read[0]
    assert '"reset"' not in read[0]
    assert "get_reward" not in read[0]
    assert "wrong" in read[1]
    assert "right" in read[2]
    assert list(environments.rewards) == ["Game"]
    assert rewards_of(environments, completion) == [0.5]
    # The object stays in this process; all else is sent.
    sent = pickle.loads(pickle.dumps(completion))
    assert sent.prompt.live == {}
    assert sent.token_ids == completion.token_ids


def test_the_next_batch_gets_the_same_environments(tiny_model):
    """As in TRL: they may hold connections, of which a server has so many only. Neither a failing
    tool nor who keeps a completion changes that."""
    environments = Environments(Game)
    chat = make_chat(tiny_model)
    first, _ = talk(chat, environments, CALL.format(3), END)
    second, _ = talk(chat, environments, CALL.replace("number", "n").format(3), END)
    third, _ = talk(chat, environments, END)
    played = {id(c.prompt.live["environments"]) for c in (first, second, third)}
    assert len(played) == 1


def test_an_environment_has_no_limit_of_turns(tiny_model):
    environments = Environments(Game)
    completion, _ = talk(make_chat(tiny_model), environments, *[CALL.format(3)] * 9, END)
    assert completion.prompt.live["environments"].tries == [3] * 9


@pytest.mark.anyio
async def test_coroutines_of_an_environment(tiny_model):
    environments = Environments(Patient)
    completion, read = talk(make_chat(tiny_model), environments, END)
    assert "What is 3 * 4?<|im_end|>" in read[0]
    assert await rewards_of(environments, completion) == [5.0]


def test_a_column_chooses_the_environment(tiny_model):
    """The reward of a class is for its own completions alone."""
    environments = Environments({"game": Game, "patient": Patient})
    assert list(environments.rewards) == ["Game", "Patient"]
    ROW.columns["environment"] = "game"
    try:
        completion, _ = talk(make_chat(tiny_model), environments, CALL.format(12), END)
        both = [completion.prompt.live["environments"], Patient()]
        assert environments.rewards["Game"](environments=both) == [1.0, None]
        ROW.columns["environment"] = "chess"
        with pytest.raises(InputError, match="environment='chess' in a row: choose from game, pat"):
            talk(make_chat(tiny_model), environments, END)
    finally:
        del ROW.columns["environment"]


def test_a_row_may_have_columns_of_any_name(tiny_model, monkeypatch):
    columns = {"answer": 3, "function": "f", "prompt": "left over"}
    monkeypatch.setattr("test_tools.ROW", replace(ROW, columns=columns))
    completion, _ = talk(make_chat(tiny_model), Environments(Game), END)
    assert completion.prompt.live["environments"].number == 3


def test_classes_of_one_name_have_one_reward():
    other = type("Game", (Game,), {"get_reward": lambda self: 7.0})
    environments = Environments({"a": Game, "b": other})
    solved = Game()
    solved.number = 1
    solved.tries = [1]
    assert environments.rewards["Game"](environments=[solved, other()]) == [1.0, 7.0]


def test_a_schema_is_made_once_for_all_environments(watch):
    made = []
    watch(tools, "get_json_schema", lambda schema, *_: made.append(schema))

    class Once(Game):
        def guess(self, number: int) -> str:
            """Guess it.

            Args:
                number: the guess
            """

    for _ in range(3):
        Environments(Once)
    assert len(made) == 1


def test_what_is_no_environment():
    with pytest.raises(InputError, match="environment_factory: object has no reset"):
        Environments(object)

    class Silent(Game):
        def shout(self, word):
            """No type."""

    with pytest.raises(InputError, match="docstrings for the arguments"):
        Environments(Silent)


def test_the_trainer_plays_and_needs_no_rows(tiny_model, tmp_path):
    """A random model calls nothing; its rewards are the environment's and the function's."""

    class Dice:
        def reset(self, **columns):
            return "Throw."

        def throw(self) -> int:
            """Throw it."""
            return 6

        def get_reward(self) -> float:
            return 0.25

    def seen(environments, completions, **columns):
        assert all(isinstance(environment, Dice) for environment in environments)
        return [float(len(completion[-1]["content"])) for completion in completions]

    save_with_template(tiny_model, tmp_path / "model")

    def trainer(**keys):
        return Trainer(
            tmp_path / "model",
            environment_factory=Dice,
            output_dir=tmp_path / "run",
            max_steps=1,
            batch_size=2,
            mini_batch_size=2,
            max_completion_length=8,
            engine="transformers",
            dtype="float32",
            **keys,
        )

    (metrics,) = trainer().train()
    assert metrics["reward"] == metrics["reward/Dice"] == 0.25
    shutil.rmtree(tmp_path / "run")
    (metrics,) = trainer(reward_funcs=seen).train()
    assert metrics["reward/Dice"] == 0.25
    assert metrics["reward"] == pytest.approx(0.25 + metrics["reward/seen"])
    with pytest.raises(InputError, match="a rollout_func plays environments itself"):
        trainer(rollout_func=Environments(Dice))


def test_an_environment_on_the_command_line(write_config, tmp_path):
    (tmp_path / "dice.py").write_text(
        "class Dice:\n"
        "    def reset(self, prompt, answer): return 'Throw.'\n"
        "    def get_reward(self): return 0.25\n"
    )
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": "2 + 2", "answer": "4"}])
    config = write_config(
        rollout__environment="dice:Dice",
        train__max_steps=1,
        reward__weights=[2.0],
        evaluation={"source": str(tmp_path / "held_out.jsonl"), "steps": 1},
    )
    (metrics,) = run(config)
    evaluations = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [line["reward/Dice"] for line in evaluations] == [0.25, 0.25]
    assert metrics["reward"] == pytest.approx(2 * metrics["reward/parity:even"] + 0.25)
    written = tmp_path / "run" / "config.yaml"
    train = load_config(written, {"train.max_steps": 2})
    with open_run(train, resume=True) as resumed:  # by the config that the run has written
        assert resumed.config.reward.functions == ["parity:even", "Dice"]
        assert resumed.config.reward.weights == [2.0, 1.0]
    with pytest.raises(InputError, match="rollout.environment=dice:Coin: cannot be imported"):
        run(write_config(output_dir=str(tmp_path / "coin"), rollout__environment="dice:Coin"))


def test_environments_that_a_batch_had_to_make_are_kept(tiny_model):
    made = []

    class Counted(Game):
        def __init__(self):
            super().__init__()
            made.append(self)

    environments = Environments(Counted)

    async def three(episode):
        for _ in range(3):
            await environments._take("", episode)
        await environments(episode)

    for _ in range(2):
        talk(make_chat(tiny_model), three, END)
        assert len(made) == 4
