"""export push_to_hub=NAME: a folder arrives on a stand-in of the hub, and the token nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import Done, run_command
from tests.helpers.model_hub import TOKEN, ModelHub, model_hub
from trainkit.errors import ConfigError, TrainkitError
from trainkit.extensions.exporting import command, hub

constants = pytest.importorskip("huggingface_hub.constants")
# of huggingface_hub's own uploads
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
EXPORT = "python -m trainkit export ckpt_path=last run_dir=run format=huggingface output=model"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelHub]:
    """A hub, to which huggingface_hub of this process speaks, with a token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # hf_xet speaks with a storage of its own; the hub takes weights by Git LFS too
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with model_hub() as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.address)
        yield there


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights and two small files."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "README.md").write_text("---\ntags:\n- trainkit\n---\n")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return made


def test_all_files_arrive_in_one_commit(server: ModelHub, folder: Path) -> None:
    """Weights by Git LFS, the others within the commit, with the token of HF_TOKEN."""
    hub.Hub("me/mine", private=True).push(folder, "step 3")
    assert server.files == {f"me/mine/{f.name}": f.read_bytes() for f in folder.iterdir()}
    assert (server.repos, server.messages) == ({"me/mine": True}, ["step 3"])
    assert server.tokens - {""} == {TOKEN}
    hub.Hub("me/mine", private=True).push(folder, "step 4")  # it is there
    assert server.messages == ["step 3", "step 4"]


def test_a_model_that_is_public_stays_unwritten_if_it_is_to_be_private(
    server: ModelHub, folder: Path
) -> None:
    """The hub's own client would upload into the public one without a note."""
    server.repos["me/mine"] = False
    with pytest.raises(ConfigError, match="private is true, but me/mine is there, and public"):
        hub.Hub("me/mine", private=True).push(folder, "step 3")
    assert server.files == {}
    hub.Hub("me/mine").push(folder, "step 3")
    assert len(server.files) == 3


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "the hub does not know the token"),
        (403, "the token must not write there"),
        (404, "no such user or organization"),
        (500, "try again later"),
    ],
)
def test_a_refusal_is_a_sentence_without_the_token(
    status: int, advice: str, server: ModelHub, folder: Path
) -> None:
    """What the hub answered and what to do; a token that the server repeats is masked."""
    server.refused = status
    with pytest.raises(TrainkitError, match=f"answered {status} .*{advice}") as error:
        hub.Hub("me/mine").push(folder, "step 3")
    assert TOKEN not in str(error.value) and "\n" not in str(error.value)
    assert error.value.__cause__ is None and error.value.__suppress_context__
    assert server.files == {}


def test_a_hub_that_is_not_there_is_a_sentence(
    server: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is named."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TrainkitError, match=r"http://127.0.0.1:9 cannot be written to"):
        hub.Hub("me/mine").push(folder, "step 3")


def test_without_a_token_nothing_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One sentence, before the run is looked for: how to get one."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
    words = ["ckpt_path=best", "run_dir=absent", "format=huggingface", "push_to_hub=me/mine"]
    assert command.main("export", words) == 2
    assert "none is set. Set HF_TOKEN to one with write access" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("private=true", "private is true, which has no effect without push_to_hub=NAME."),
        ("push_to_hub=me/mine", "push_to_hub is 'me/mine', but format=safetensors writes a file."),
        (
            "format=huggingface push_to_hub=me/mine private=yes",
            "private is 'yes'; it must be true or false.",
        ),
        ("format=huggingface push_to_hub=mine", "push_to_hub is 'mine'; it must be a user or"),
        ("format=huggingface push_to_hub=me/mi/ne", "push_to_hub is 'me/mi/ne': Repo id must"),
        ("format=huggingface push_to_hub=me/..", "push_to_hub is 'me/..': "),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    words: str, error: str, server: ModelHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the run is looked for."""
    assert command.main("export", ["ckpt_path=best", "run_dir=absent", *words.split()]) == 2
    assert error in " ".join(capsys.readouterr().err.split())
    assert server.tokens == set()


@pytest.mark.parallel
def test_a_run_is_pushed_and_the_token_is_in_no_file(tmp_path: Path) -> None:
    """Config, weights, tokenizer, generation config and card arrive by HF_ENDPOINT; a later refusal
    leaves the folder, and neither files nor outputs hold the token.
    """
    pytest.importorskip("transformers")
    line = "python -m trainkit fit conf=llama trainer.max_steps=2 logger=csv run_dir=run"
    assert run_command(line, tmp_path, OMP_NUM_THREADS="1").code == 0
    with model_hub() as there:

        def export(name: str) -> Done:
            line = f"{EXPORT} push_to_hub=me/{name} private=true"
            own = {"HF_ENDPOINT": there.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
            return run_command(line, tmp_path, **own, OMP_NUM_THREADS="1", HF_HOME=str(tmp_path))

        done = export("mine")
        assert done.code == 0, done.text
        assert f"pushed      {there.address}/me/mine" in done.out
        there.refused = 403
        refused = export("other")
        assert refused.code == 1 and "the token must not write there" in refused.err
    written = {f"me/mine/{file.name}": file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert {*there.files} == {*written} and len(written) == 6
    same = [name for name in written if not name.endswith("README.md")]
    assert all(written[name] == there.files[name] for name in same)
    assert b'from_pretrained("me/mine")' in there.files["me/mine/README.md"]
    assert TOKEN not in done.text + refused.text
    held = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(held) > 10
    assert [file for file in held if TOKEN.encode() in file.read_bytes()] == []
