"""recipes/hf.py and hf_data.py:
models of transformers from types and folders, exact over ranks, and the folder they leave.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import trainkit
from recipes.hf import READS_WHOLE_MASKS, HFCausalLM, HFClassifier
from recipes.hf_data import Texts, read_texts, sentences
from recipes.sft import ChatModel
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import quiet
from tests.helpers.waits import Waits, silent
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.data.order import shuffled
from trainkit.errors import CheckpointError, ConfigError, DataError

SGD = partial(torch.optim.SGD, lr=0.1)
BERT: dict[str, Any] = {
    "vocab_size": 258,
    "pad_token_id": 256,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "vocab_size": 258,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
}
GPT2 |= {
    "bos_token_id": 257,
    "eos_token_id": 257,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def lm(**options: Any) -> HFCausalLM:
    """Return a tiny GPT-2 without dropout."""
    torch.manual_seed(3)
    return HFCausalLM(SGD, model_type="gpt2", config=GPT2, **options)


def texts(**options: Any) -> Texts:
    """Return the generated sentences, in small batches."""
    return Texts(**{"batch_size": 4, "max_length": 64} | options)


def weights(task: nn.Module) -> torch.Tensor:
    """Return all weights in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in task.parameters()])


def test_a_step_is_that_of_the_mean_over_its_tokens(tmp_path: Path) -> None:
    """One process, two ranks, and a plain loop over the step's 8 texts end with the same weights:
    texts differ in length.
    """
    file = tmp_path / "texts.txt"
    file.write_text("\n".join("word " * (1 + i * i % 11) for i in range(20)))

    plain, data = lm().double(), texts(file=str(file), batch_size=8)
    begun = copy.deepcopy(plain)  # ranks are threads, and share the random numbers

    def train(engine: ThreadEngine, batch_size: int) -> torch.Tensor:
        task, data = copy.deepcopy(begun), texts(file=str(file), batch_size=batch_size)
        options = {
            "precision": "64-true",
            "lr_scaling": "none",
            "enable_checkpointing": False,
            "logger": False,
        }
        options |= {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
        }
        trainkit.Trainer(engine=engine, max_steps=2, run_dir=str(tmp_path / "run"), **options).fit(
            task, datamodule=data
        )
        return weights(task)

    data.setup("fit")
    optimizer = SGD(plain.parameters())
    for step in range(2):
        batch = data.collate(
            [data.train[int(i)] for i in shuffled(len(data.train), 0, 0)[step * 8 : step * 8 + 8]]
        )
        logits_BTV = plain.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        counted = batch["attention_mask"][:, 1:].bool()
        losses = nn.functional.cross_entropy(
            logits_BTV[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        )
        optimizer.zero_grad()
        losses[counted].mean().backward()
        optimizer.step()
    (alone,), pair = (
        World(1).run(partial(train, batch_size=8)),
        World(2).run(partial(train, batch_size=4)),
    )
    for found in (alone, *pair):
        torch.testing.assert_close(found, weights(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "auto", "data"),
    [
        (lm, transformers.AutoModelForCausalLM, texts),
        (
            lambda: HFClassifier(2, SGD, model_type="bert", config=BERT),
            transformers.AutoModelForSequenceClassification,
            lambda: texts(num_classes=2),
        ),
    ],
)
def test_the_folder_of_a_fit_is_read_by_transformers(
    make: Callable[[], Any], auto: Any, data: Callable[[], Texts], tmp_path: Path
) -> None:
    """`from_pretrained` of run_dir/pretrained gives the same logits;
    and so does the recipe itself, from the folder.
    """
    task, held = make(), data()
    quiet(tmp_path, max_steps=2).fit(task, datamodule=held)
    ids = torch.arange(20).reshape(2, 10)
    folder = str(tmp_path / "pretrained")
    other = auto.from_pretrained(folder)
    again = (
        HFClassifier(2, SGD, model=folder) if held.num_classes else HFCausalLM(SGD, model=folder)
    )
    with torch.no_grad():
        expected = task.eval()(ids)
        assert torch.equal(other.eval()(input_ids=ids).logits, expected)
        assert torch.equal(again.eval()(ids), expected)


def test_a_folders_model_is_trained_with_its_dropout(tmp_path: Path) -> None:
    """`from_pretrained` leaves a model in eval mode."""
    lm().model.save_pretrained(tmp_path / "lm")
    HFClassifier(2, SGD, model_type="bert", config=BERT).model.save_pretrained(tmp_path / "bert")
    tasks = [
        HFCausalLM(SGD, model=str(tmp_path / "lm")),
        ChatModel(SGD, model=str(tmp_path / "lm")),
        HFClassifier(2, SGD, model=str(tmp_path / "bert")),
    ]
    for task in tasks:
        assert all(module.training for module in task.modules())


def test_a_run_is_exported(tmp_path: Path) -> None:
    """The file computes the logits of the Task, whose inputs are token numbers."""
    task = HFClassifier(2, SGD, model_type="bert", config=BERT)
    trainkit.export(task, tmp_path / "model.safetensors", format="safetensors")
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("make", [lm, lambda: HFClassifier(2, SGD, model_type="bert", config=BERT)])
def test_a_run_becomes_a_folder_of_transformers(make: Callable[[], Any], tmp_path: Path) -> None:
    """format=huggingface calls the model's own save_pretrained;
    the folder's weights start another run.
    """
    task, other = make(), make()
    with torch.no_grad():
        next(task.parameters()).add_(1.0)
    trainkit.export(task, tmp_path / "model", format="huggingface", rebuilt=other)
    assert torch.equal(weights(other), weights(task))
    theirs = type(task.model).from_pretrained(tmp_path / "model")
    assert torch.equal(weights(theirs), weights(task))


@pytest.mark.parametrize("pad", [None, 0])
def test_a_decoders_head_reads_the_last_token_before_the_padding(
    pad: int | None, tmp_path: Path
) -> None:
    """That of the data, which the model's config need not know: a text has the same logits alone and
    beside a longer one.
    """
    task = HFClassifier(2, SGD, model_type="gpt2", config=GPT2 | {"pad_token_id": pad})
    data = texts(num_classes=2)
    quiet(tmp_path, max_steps=1).fit(task, datamodule=data)
    short, long = (data.tokens("b" * length) for length in (2, 9))
    alone, both = (data.collate([(ids, 0) for ids in given]) for given in ([short], [short, long]))
    with torch.no_grad():
        task.eval()
        torch.testing.assert_close(task.predict_step(both, 0)[:1], task.predict_step(alone, 0))
    written = json.loads((tmp_path / "pretrained" / "config.json").read_text())
    assert written["pad_token_id"] == 256


def test_a_head_for_another_number_of_classes_is_new(tmp_path: Path) -> None:
    """All else of the folder's model stays."""
    first = HFClassifier(2, SGD, model_type="bert", config=BERT)
    first.model.save_pretrained(tmp_path)
    other = HFClassifier(5, SGD, model=str(tmp_path))
    assert other.model.classifier.weight.shape == (5, 8)
    assert torch.equal(
        other.model.bert.embeddings.word_embeddings.weight,
        first.model.bert.embeddings.word_embeddings.weight,
    )


@pytest.mark.parametrize("classifies", [False, True])
def test_a_folder_whose_weights_do_not_fit_is_refused(classifies: bool, tmp_path: Path) -> None:
    """Of a classifier the head alone may be new; transformers would draw all of another size."""
    first = HFClassifier(2, SGD, model_type="bert", config=BERT) if classifies else lm()
    first.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    name = "bert.embeddings.word_embeddings" if classifies else "transformer.wte"
    text = rf"weight '{name}\.weight' has the shape \(258, 8\), .* asks for \(300, 8\)"
    with pytest.raises(ConfigError, match=text):
        if classifies:
            HFClassifier(5, SGD, model=str(tmp_path))
        else:
            HFCausalLM(SGD, model=str(tmp_path))


def test_validation_weighs_tokens(tmp_path: Path) -> None:
    """val/loss is the mean over all tokens of all texts, whatever their batches."""
    task = lm()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(20)  # so that texts differ in their loss
    found = [
        quiet(tmp_path).validate(task, datamodule=texts(batch_size=size))["val/loss"]
        for size in (1, 7, 72)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_a_model_of_bytes_continues_a_text() -> None:
    """Without a tokenizer, as its data were read; a model of other tokens asks for its own."""
    task = lm().eval()
    pieces = [*task.generate("The film was", max_new_tokens=5, temperature=0)]
    ids = torch.tensor([texts().tokens("The film was").tolist()])
    theirs = task.model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=256)
    made = bytes(theirs[0, ids.shape[1] :].clamp(max=255).tolist()).decode(errors="replace")
    assert len(pieces) <= 5 and made.startswith("".join(pieces))
    with pytest.raises(ConfigError, match="There is no tokenizer"):
        other = HFCausalLM(SGD, model_type="gpt2", config=GPT2 | {"vocab_size": 400})
        next(other.generate("x"))


def test_an_answer_during_a_fit_is_without_dropout() -> None:
    """It draws nothing of the training's random numbers, and the model is in train mode again."""
    task = HFCausalLM(SGD, model_type="gpt2", config=GPT2 | {"resid_pdrop": 0.5})
    before = torch.get_rng_state()
    shown = [*task.generate("The film was", max_new_tokens=5, temperature=0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in task.modules())
    assert shown == [*task.eval().generate("The film was", max_new_tokens=5, temperature=0)]


def test_a_batch_is_as_long_as_its_longest_text() -> None:
    """Padding is masked in attention and labels, and no batch is padded to max_length."""
    data = texts(max_length=6)
    data.setup("fit")
    batch = data.collate([(data.tokens("ab"), None), (data.tokens("abc"), None)])
    assert batch["input_ids"].tolist() == [[257, 97, 98, 256], [257, 97, 98, 99]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[257, 97, 98, -100], [257, 97, 98, 99]]
    assert len(data.tokens("a long text")) == 6


def test_a_folder_of_a_tokenizer(tmp_path: Path) -> None:
    """Its numbers, its vocabulary and its padding are used, and fit's folder holds it too."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.save_pretrained(tmp_path / "words")
    data = texts(tokenizer=str(tmp_path / "words"))
    assert (data.vocab_size, data.tokens("b a c").tolist()) == (4, [3, 2, 1])
    quiet(tmp_path / "run", max_steps=1).fit(lm(), datamodule=data)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "pretrained")("b")[
        "input_ids"
    ] == [3]


def test_files_of_all_kinds(tmp_path: Path) -> None:
    """A .csv and a .jsonl have texts and labels, a .txt texts."""
    (tmp_path / "a.csv").write_text('text,label\n"one, two",x\nthree,y\n')
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in (("one", 1), ("two", 0)))
    )
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_texts(str(tmp_path / "a.csv"), True) == [("one, two", "x"), ("three", "y")]
    assert read_texts(str(tmp_path / "a.jsonl"), True) == [("one", "1"), ("two", "0")]
    assert read_texts(str(tmp_path / "a.txt"), False) == [("one", ""), ("two", "")]
    assert len(sentences()) == len(set(sentences())) == 720


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", "text,class\nx,y\nz,y\n", "row 2 has no 'label'; it has text, class"),
        ("a.jsonl", '{"text": "x", "label": 1}\nnothing\n', "row 2 has no 'text'; it has nothing"),
        ("a.csv", "text,label\nx,y\n", "has 1 texts"),
        ("a.txt", "x\ny\n", "it must be a .csv or .jsonl with text and label"),
    ],
)
def test_a_file_that_cannot_be_read_is_explained(
    name: str, content: str, text: str, tmp_path: Path
) -> None:
    """The error names the file and the row."""
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=text):
        read_texts(str(tmp_path / name), True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"model_type": "bret"},
            "task.model_type is 'bret', which transformers lacks. Did you mean 'bert'",
        ),
        (
            {"model_type": "gpt2", "config": {"n_layers": 2}},
            "n_layers is not a setting of GPT2Config. Did you mean 'n_layer'",
        ),
        ({"model_type": "clip"}, "task.model_type is 'clip', which AutoModelForCausalLM refuses"),
        ({}, "give the folder of a model"),
        ({"model": ".", "model_type": "gpt2"}, "give the folder of a model"),
        ({"model": "."}, "task.model is '.', and no model can be loaded from it"),
    ],
)
def test_a_model_that_cannot_be_made_is_explained(options: Any, text: str) -> None:
    """The error names the key, the value, and what to do;
    transformers itself accepts any name in a config.
    """
    with pytest.raises(ConfigError, match=text):
        HFCausalLM(SGD, **options)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 100), ("n_positions", 32)])
def test_a_model_too_small_for_the_data_is_named(key: str, value: int, tmp_path: Path) -> None:
    """The first step would end in an index out of range."""
    task = HFCausalLM(
        SGD, model_type="gpt2", config=GPT2 | {key: value, "bos_token_id": 0, "eos_token_id": 0}
    )
    with pytest.raises(ConfigError, match=f"is {value}; it must be"):
        quiet(tmp_path, max_steps=1).fit(task, datamodule=texts())


def test_labels_are_counted() -> None:
    """Another number of labels than that of the model's head is an error with the right one."""
    with pytest.raises(
        ConfigError, match=r"data.num_classes is 3, but the texts have 2 labels \(bad, good\)"
    ):
        texts(num_classes=3).setup("fit")


def reviews(tmp_path: Path, labels: list[str]) -> Texts:
    """Return texts with these labels, one each, for training and for validation."""
    file = tmp_path / "reviews.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"It is {x}", "label": x}) for x in labels))
    return texts(file=str(file), val_file=str(file), num_classes=len(labels))


def test_labels_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    """Label 10 is number 10, not 2, as in the head that was trained on such numbers."""
    data = reviews(tmp_path, [str(number) for number in range(12)])
    data.setup("fit")
    assert data.classes == [str(number) for number in range(12)]


def test_a_heads_classes_have_its_numbers(tmp_path: Path) -> None:
    """A folder's head that names its classes in an order of its own is trained and validated by
    it; a new head's folder has the names of the data.
    """
    names = ["entailment", "neutral", "contradiction"]
    data = reviews(tmp_path, [name.upper() for name in names])
    first = HFClassifier(3, SGD, model_type="bert", config=BERT)
    first.model.config.id2label = dict(enumerate(names))
    with torch.no_grad():
        first.model.classifier.bias.copy_(torch.tensor([9.0, 0.0, 0.0]))  # says entailment
    first.model.save_pretrained(tmp_path / "model")
    task = HFClassifier(3, SGD, model=str(tmp_path / "model"))
    quiet(tmp_path / "own").validate(task, datamodule=data)
    batch = data.collate([data.val[0]])
    assert task._evaluated(batch)[1] == 1.0

    new = HFClassifier(3, SGD, model_type="bert", config=BERT)
    quiet(tmp_path / "new", max_steps=1).fit(new, datamodule=data)
    written = json.loads((tmp_path / "new" / "pretrained" / "config.json").read_text())
    assert written["id2label"] == {str(n): name for n, name in enumerate(data.classes)}


def test_weights_in_several_files_of_transformers_begin_a_run(tmp_path: Path) -> None:
    """Bit for bit; those of another depth are listed by name, and strict=false loads the rest."""
    task, other = lm(), lm()
    task.model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    given = other.translate_weights(read_weights(str(tmp_path)))
    assert load_into(other, given, str(tmp_path)) == []
    for own, expected in zip(other.parameters(), task.parameters(), strict=True):
        assert torch.equal(own, expected)
    deeper = HFCausalLM(SGD, model_type="gpt2", config=GPT2 | {"n_layer": 3})
    given = deeper.translate_weights(read_weights(str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"missing in the file: model\.transformer\.h\.1\."):
        load_into(deeper, given, str(tmp_path))
    lines = load_into(deeper, given, str(tmp_path), strict=False)
    assert lines and all(re.search(r"\.h\.[12]\.", line) for line in lines)


# -- waits for the device -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", READS_WHOLE_MASKS)
def test_padding_of_a_classifier_costs_no_wait(kind: str) -> None:
    """Its logits are those of transformers' own mask, to the bit."""
    sizes = BERT | {"dim": 8, "n_heads": 2, "n_layers": 1, "hidden_dim": 8, "pad_token_id": 1}
    plain = transformers.AutoConfig.for_model(kind)
    config = {name: value for name, value in sizes.items() if hasattr(plain, name)}
    task = silent(HFClassifier(3, SGD, model_type=kind, config=config)).eval()
    mask_BT = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    ids_BT = torch.where(mask_BT.bool(), torch.randint(2, 64, (3, 9)), 1)
    batch = {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": torch.tensor([0, 1, 2])}
    with torch.no_grad():
        own = task.model(input_ids=ids_BT, attention_mask=mask_BT).logits
        assert torch.equal(task(ids_BT, mask_BT), own)
        assert not torch.equal(task(ids_BT, None), own)
    with Waits() as waits:
        task.training_step(batch, 0).backward()
    assert waits.seen == []


def test_padding_of_a_causal_model_costs_no_wait() -> None:
    """Nor a mask, since no token sees what stands after it: the loss is that with a mask."""
    task, data = silent(lm()), texts()
    data.setup("fit")
    batch = data.collate([data.train[i] for i in range(4)])
    assert not batch["attention_mask"].all()
    with_mask = task._loss(batch)
    task.setup("fit")
    torch.testing.assert_close(task._loss(batch), with_mask, rtol=0, atol=1e-6)
    with Waits() as waits:
        task.training_step(batch, 0).backward()
        task.batch_weight(batch)
    assert waits.seen == []


@pytest.mark.parametrize(
    ("theirs_has", "line"),
    [
        ({}, None),
        ({"attn_pdrop": 0.3, "bos_token_id": 3}, None),
        ({"n_head": 4}, "num_attention_heads is 4 in config.json, and 2 here; set task.config."),
        ({"model_type": "llama"}, None),  # its weights have other names
    ],
)
def test_the_config_of_other_weights_is_compared(
    theirs_has: dict[str, Any], line: str | None, tmp_path: Path
) -> None:
    """With what changes answers, and no shape: as transformers reads it, and as it writes it."""
    lm().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    lines = lm().compare_config(config | theirs_has)
    assert lines == [] if line is None else lines[0].startswith(line)
