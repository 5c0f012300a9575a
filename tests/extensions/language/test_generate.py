"""`generate`: a run's own config and best checkpoint continue a text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.language_model import LanguageModel
from trainkit.cli.run import main as fit
from trainkit.errors import TaskError
from trainkit.extensions.language import generate_command as generate

SMALL = [
    "task.model.width=16",
    "task.model.depth=1",
    "task.model.heads=2",
    "data.context=8",
    "logger=none",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run on a text, which is no longer there."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "my.txt"
    text.write_text("to be or not to be " * 20)
    assert (
        fit(
            "fit",
            [
                "conf=gpt",
                f"data.file={text}",
                f"run_dir={folder / 'run'}",
                "trainer.max_steps=3",
                *SMALL,
            ],
        )
        == 0
    )
    text.unlink()
    return folder / "run"


def test_a_runs_model_continues_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best checkpoint is taken, the prompt is printed before its continuation;
    a seed repeats it.
    """
    asked = [str(run), "prompt=to be = or", "max_new_tokens=5", "top_k=3", "seed=1"]
    assert generate.main("generate", asked) == 0
    out = capsys.readouterr().out
    assert "/checkpoints/epoch=" in out.splitlines()[0]
    assert "\nto be = or" in out and "5 tokens, " in out
    assert generate.main("generate", asked) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == out.splitlines()[:-1]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["RUN"], "prompt is missing"),
        (["RUN", "prompt=x", "prompts=x.txt"], "prompt and prompts are both given"),
        (["RUN", "prompts=absent.txt"], "prompts is 'absent.txt', which cannot be read"),
        (["RUN", "prompt=x", "batch_size=2"], "batch_size is 2, but there is one prompt"),
        (["prompt=x"], "The run's folder comes first"),
        (["nowhere", "prompt=x"], "nowhere is no run with checkpoints"),
        (["RUN", "prompt=x", "temperature=-1"], "temperature is '-1'"),
        (
            ["RUN", "prompt=x", "tokenizer=absent.json"],
            "tokenizer is 'absent.json', and there is no such file",
        ),
        (["RUN", "prompt=x", "top_p=0"], "top_p is '0'; it must be above 0, and 1 or less"),
        (["RUN", "prompt=x", "topk=3"], "Did you mean 'top_k'?"),
        (["RUN", "prompt=x", "max_new_tokens=0"], "max_new_tokens is '0'"),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what is legal."""
    assert generate.main("generate", [word.replace("RUN", str(run)) for word in typed]) == 2
    assert said in capsys.readouterr().err


def test_a_task_that_makes_no_text_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the method that a Task of the user's own would need."""
    assert (
        fit(
            "fit", ["conf=mlp", f"run_dir={tmp_path / 'mlp'}", "trainer.max_steps=1", "logger=none"]
        )
        == 0
    )
    assert generate.main("generate", [str(tmp_path / "mlp"), "prompt=x"]) == 1
    assert "ImageClassifier has no generate()" in capsys.readouterr().err


def test_the_last_checkpoint_serves_without_a_best_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without a monitor has no best checkpoint."""
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/checkpoints/best").unlink()
    assert generate.main("generate", [str(tmp_path / "copy"), "prompt=x", "max_new_tokens=1"]) == 0
    assert "1 token, " in capsys.readouterr().out


class Older:
    """A Task of a user's own, as before tokenizers."""

    def generate(
        self, prompt: str, max_new_tokens: int, temperature: float, top_k: int | None, seed: int
    ) -> list[str]:
        """Return nothing."""
        return []


def optional(task: Any, run_dir: Path, **given: Any) -> dict[str, Any]:
    """Return the arguments beside the prompt that a Task's generate() gets."""
    request = {"tokenizer": None, "system": None, "top_p": None} | given
    return generate._optional(task.generate, request, str(run_dir))


def test_a_tokenizer_goes_to_a_task_that_takes_one(tmp_path: Path) -> None:
    """The run's own copy by default, or the one beside the model that it left;
    a Task without the argument gets none, and one that was given is refused.
    """
    assert optional(LanguageModel, tmp_path) == {"tokenizer": None, "top_p": None}
    left = tmp_path / "pretrained"
    left.mkdir()
    (left / "tokenizer_config.json").touch()
    assert optional(LanguageModel, tmp_path)["tokenizer"] == str(left)
    (tmp_path / "tokenizer.json").touch()
    assert optional(LanguageModel, tmp_path)["tokenizer"] == str(tmp_path / "tokenizer.json")
    assert optional(LanguageModel, tmp_path, tokenizer="mine")["tokenizer"] == "mine"
    assert optional(Older(), tmp_path) == {}


@pytest.mark.parametrize("given", [{"tokenizer": "mine"}, {"system": "Be brief."}, {"top_p": 0.5}])
def test_what_a_task_does_not_take_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    """A setting without effect is an error."""
    (name,) = given
    with pytest.raises(TaskError, match=f"{name} is .* but this Task's generate\\(\\) takes none"):
        optional(Older(), tmp_path, **given)


def test_prompts_of_a_file_are_answered_as_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line but empty ones, in order, whatever batch_size is."""
    (tmp_path / "prompts.txt").write_text("to be\n\nor not = 1\nthat\n")
    drawn = ["max_new_tokens=6", "seed=3", "top_p=0.9"]
    alone = []
    for prompt in ("to be", "or not = 1", "that"):
        assert generate.main("generate", [str(run), f"prompt={prompt}", *drawn]) == 0
        alone.append(capsys.readouterr().out.split("\n\n", 1)[1].rsplit("\n\n", 1)[0])
    for size in ([], ["batch_size=2"]):
        asked = [str(run), f"prompts={tmp_path / 'prompts.txt'}", *drawn, *size]
        assert generate.main("generate", asked) == 0
        out = capsys.readouterr().out
        assert out.split("\n\n", 1)[1].rsplit("\n\n", 1)[0] == "\n\n".join(alone)
        assert "3 prompts, " in out and " tokens, " in out


def test_a_file_without_prompts_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blank lines are none."""
    (tmp_path / "prompts.txt").write_text("\n  \n")
    asked = [str(run), f"prompts={tmp_path / 'prompts.txt'}"]
    assert generate.main("generate", asked) == 2
    assert "which has no prompt. Write one in each line" in capsys.readouterr().err


class Echo:
    """A Task of a user's own that answers one prompt."""

    def generate(self, prompt: str, **_: Any) -> list[str]:
        """Return it."""
        return [prompt.upper()]


def test_a_task_that_answers_one_prompt_answers_each(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other; a batch_size, which would have no effect, is refused."""
    assert generate._answer_all(Echo(), ["a", "b"], {}, None) == 2
    assert capsys.readouterr().out == "\naA\n\nbB\n"
    with pytest.raises(TaskError, match="Echo has no text_source"):
        generate._answer_all(Echo(), ["a", "b"], {}, 2)


def test_a_chat_model_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer and the template of the model that the fit has left."""
    pytest.importorskip("transformers")
    run = str(tmp_path / "chat")
    small = ["conf=sft", f"run_dir={run}", "trainer.max_steps=1", "logger=none"]
    assert fit("fit", small) == 0
    capsys.readouterr()
    asked = [run, "prompt=1 + 1 = ?", "max_new_tokens=4", "top_p=0.9", "system=Be brief."]
    assert generate.main("generate", asked) == 0
    out = capsys.readouterr().out
    assert "\n\n1 + 1 = ?" in out and "tokens/s" in out
    (tmp_path / "prompts.txt").write_text("1 + 1 = ?\n" + "12 " * 500 + "\n")
    asked[1:3] = [f"prompts={tmp_path / 'prompts.txt'}", "max_new_tokens=4"]
    assert generate.main("generate", asked) == 2
    assert "Prompt 2 of the file: The prompt has 1" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("1 + 1 = ?\n12 + 12 = ?\n")
    assert generate.main("generate", asked) == 0
    both = capsys.readouterr().out
    one = out.split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
    assert f"\n\n{one}\n\n12 + 12 = ?" in both
