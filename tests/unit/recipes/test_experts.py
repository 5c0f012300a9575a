"""recipes/experts.py, by recipes/llama.py: the same balance on any ranks and microbatches."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.mixtral import modeling_mixtral as mixtral

import trainkit
from recipes.experts import Routed, Routers, even_loss, routers_of
from recipes.llama import Llama
from recipes.sft import ChatModel
from recipes.sft_data import Conversations
from recipes.tokens import TokenFiles
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.data.order import shuffled
from trainkit.errors import ConfigError
from trainkit.extensions.insight.model_summary.layers import flop_counter

SGD = partial(torch.optim.SGD, lr=0.5)
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
CONTEXT, END, STEP = 16, 0xFF, 6
LAYOUTS = [(1, 6), (1, 2), (1, 1), (2, 3), (2, 1), (3, 1)]  # ranks, rows of a microbatch


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms and routers compute in the precision of their input, in place of float32."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)

    def by_softmax(self: Any, x: Tensor) -> Any:
        logits = nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        weights, chosen = logits.softmax(-1).topk(self.top_k, -1)
        return logits, weights / weights.sum(-1, True), chosen

    def by_bias(self: Any, x: Tensor) -> Any:
        logits = nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        scores = logits.sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, -1)[1]
        weights = scores.gather(1, chosen)
        return logits, weights / weights.sum(-1, True), chosen

    monkeypatch.setattr(mixtral.MixtralRMSNorm, "forward", norm)
    monkeypatch.setattr(glm.Glm4MoeRMSNorm, "forward", norm)
    monkeypatch.setattr(mixtral.MixtralTopKRouter, "forward", by_softmax)
    monkeypatch.setattr(glm.Glm4MoeTopkRouter, "forward", by_bias)


def with_experts(**options: Any) -> Llama:
    """Return a task with four experts, made."""
    torch.manual_seed(3)
    task = Llama(SGD, context=CONTEXT, config=SMALL, **{"experts": 4} | options)
    task._make_model()
    return task


def fit(
    begun: Llama, root: str, folder: Path, batch_size: int, engine: Any = None, **settings: Any
) -> Llama:
    """Return a copy after three steps, in float64."""
    task = copy.deepcopy(begun)
    given: dict[str, Any] = {"max_steps": 3, "global_batch_size": STEP, "limit_val_batches": 0}
    given |= {"precision": "64-true", "lr_scaling": "none"}
    given |= {} if engine is None else {"engine": engine}
    ckpt_path = settings.pop("ckpt_path", None)
    data = TokenFiles(root, context=CONTEXT, batch_size=batch_size)
    quiet(folder, **given | settings).fit(task, datamodule=data, ckpt_path=ckpt_path)
    return task


def state(task: nn.Module) -> Tensor:
    """Return all weights and biases in one vector."""
    return torch.cat([value.detach().double().flatten() for value in task.state_dict().values()])


@pytest.mark.parametrize("balance", ["loss", "bias"])
@pytest.mark.parametrize(("ranks", "batch_size"), LAYOUTS)
def test_any_ranks_and_microbatches_train_alike(
    ranks: int, batch_size: int, balance: Any, root: str, tmp_path: Path
) -> None:
    """Three steps to 1e-12."""
    begun = with_experts(balance=balance, balance_factor=0.05)
    alone = fit(begun, root, tmp_path / "alone", STEP)

    def one(engine: ThreadEngine) -> Tensor:
        return state(fit(begun, root, tmp_path / "ranks", batch_size, engine))

    for result in World(ranks).run(one):
        torch.testing.assert_close(result, state(alone), rtol=0, atol=1e-12)
    assert (state(alone) - state(begun.double())).abs().max() > 1e-3


@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_a_run_resumes_bit_for_bit(balance: Any, root: str, tmp_path: Path) -> None:
    """Biases included, which the weights of a later step depend on."""
    begun = with_experts(balance=balance, balance_factor=0.05)

    def run(name: str, **settings: Any) -> Tensor:
        saves = [ModelCheckpoint(save_last=True)]
        return state(fit(begun, root, tmp_path / name, 2, callbacks=saves, **settings))

    whole = run("whole", max_steps=4)
    begun = with_experts(balance=balance, balance_factor=0.05)
    run("parts", max_steps=2)
    assert torch.equal(run("parts", max_steps=4, ckpt_path="last"), whole)


def test_activation_checkpointing_changes_nothing(root: str, tmp_path: Path) -> None:
    """A forward that runs again in backward counts once."""
    for balance in ("loss", "bias"):
        begun = with_experts(balance=balance, balance_factor=0.05)
        plain = fit(begun, root, tmp_path / "a", 2)
        again = fit(begun, root, tmp_path / "b", 2, activation_checkpointing=True)
        torch.testing.assert_close(state(again), state(plain), rtol=0, atol=1e-15)


def test_the_loss_of_even_and_of_uneven_rows() -> None:
    """1 if tokens are spread evenly; E / K if all go to the same experts; each row by itself, so
    that two rows which are uneven in opposite ways are not even together.
    """
    sure = 1e9 * torch.tensor([[[1.0, 1, 0, 0], [0, 0, 1, 1]], [[1, 1, 0, 0], [1, 1, 0, 0]]])
    logits_NE = torch.cat([sure, sure[1:].flip(-1)]).flatten(0, 1).double()
    routed = Routed(logits_NE, logits_NE.topk(2).indices)
    assert even_loss([routed], 3).tolist() == [1.0, 2.0, 2.0]
    assert even_loss([routed, routed], 3).tolist() == [2.0, 4.0, 4.0]  # layers add up


def test_the_loss_is_that_of_switch_in_a_row() -> None:
    """Of one row: transformers' loss, divided by the experts of a token; with its gradient."""
    torch.manual_seed(0)
    logits_NE = torch.randn(20, 5, requires_grad=True)
    theirs = mixtral.load_balancing_loss_func((logits_NE,), 5, 2) / 2
    ours = even_loss([Routed(logits_NE, logits_NE.softmax(-1).topk(2).indices)], 1).sum()
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss, logits_NE)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-4


def test_the_load_is_that_of_the_whole_step(root: str, tmp_path: Path) -> None:
    """The largest and the smallest over the mean, of all ranks and microbatches: the same on any;
    an expert without tokens shows as 0.
    """
    logged = []
    for ranks, batch_size in ((1, 6), (2, 1)):
        begun = with_experts(balance="bias", balance_factor=0.0)
        for bias in Routers(begun.model).biases():
            bias[1] = -100.0  # a dead expert

        def one(engine: ThreadEngine, begun: Llama = begun, size: int = batch_size) -> Any:
            store = Store()
            fit(begun, root, tmp_path, size, engine, callbacks=[store], log_every_n_steps=2)
            return store.values

        logged.append(World(ranks).run(one)[0])
    assert logged[0] == logged[1]
    assert [step for step, _ in logged[0]] == [2]
    assert logged[0][0][1]["expert_load/min"] == 0
    assert 4 / 3 <= logged[0][0][1]["expert_load/max"] <= 4 / 2  # two of four experts at most


class Store(trainkit.Callback):
    """Stores the loads that are logged."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_metrics(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        """Store them."""
        own = {name: value for name, value in metrics.items() if name.startswith("expert_load")}
        self.values += [(step, own)] if own else []


def test_a_bias_moves_by_the_counts_of_the_step(root: str, tmp_path: Path) -> None:
    """By the rate: up with fewer tokens than the mean, down with more; once a step."""
    begun = with_experts(balance="bias", balance_factor=0.5)
    task = fit(begun, root, tmp_path, 2, max_steps=1)
    data = TokenFiles(root, context=CONTEXT)
    data.setup("fit")
    rows = torch.stack([data.train[int(i)] for i in shuffled(len(data.train), 0, 0)[:STEP]])
    begun.double().model.set_experts_implementation("eager")
    begun._end_of_text = END
    assert begun._load is not None and begun._load.routers is not None
    with begun._load.routers.watched() as routed:
        begun._loss(rows)
    counts_LE = torch.stack([each.picks_NE.sum(0) for each in routed])
    expected = 0.5 * (counts_LE.mean(1, keepdim=True) - counts_LE).sign()
    assert torch.equal(torch.stack(Routers(task.model).biases()), expected)
    assert expected.ne(0).any()


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_an_expert_without_tokens_has_a_gradient_of_zeros(kind: Any, implementation: str) -> None:
    """In either way that transformers computes experts; so it takes part in all sums."""
    task = with_experts(balance="loss" if kind == "mixtral" else "bias")
    assert task.model.config.model_type == kind
    task.model.set_experts_implementation(implementation)
    for router in routers_of(task.model):
        nn.init.zeros_(router.weight)  # experts 0 and 1 win each tie, or all tokens choose the same
    assert task._load is not None and task._load.routers is not None
    with task._load.routers.watched() as routed:
        task._loss(torch.arange(CONTEXT + 1)[None] % 200).backward()
    empty_LE = torch.stack([each.picks_NE.sum(0) for each in routed]) == 0
    assert empty_LE.any()
    for layer, empty_E in zip(task.model.model.layers, empty_LE, strict=True):
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            assert weight.grad[empty_E].eq(0).all()
            assert weight.grad[~empty_E].ne(0).any()


def test_flops_are_those_of_the_experts_that_work() -> None:
    """Forward and backward: as many by products of groups as by products of each expert, and no more
    with more experts.
    """
    rows, counted = torch.arange(2 * CONTEXT + 2).view(2, -1), []
    for experts, implementation in ((4, "grouped_mm"), (4, "eager"), (8, "grouped_mm")):
        task = with_experts(experts=experts)
        task.model.set_experts_implementation(implementation)
        router = sum(each.weight.numel() for each in routers_of(task.model))
        with flop_counter() as counter:
            task._loss(rows).backward()
        # of routers: forward, to watch again, and two products of backward
        counted.append(counter.get_total_flops() - 4 * 2 * router * 2 * CONTEXT)
    assert counted[0] == counted[1] == counted[2]


@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_an_export_is_opened_by_transformers(balance: Any, tmp_path: Path) -> None:
    """`from_pretrained` of the folder gives equal logits, biases included."""
    task = with_experts(balance=balance).eval()
    for bias in Routers(task.model).biases() if balance == "bias" else ():
        bias.normal_()
    trainkit.export(task, tmp_path / "model", format="huggingface")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    batch = torch.arange(2 * CONTEXT).view(2, CONTEXT)
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=batch).logits, task(batch))
    assert len("".join(task.generate("on", 4, temperature=0))) <= 8
    other = with_experts(balance=balance)
    nn.init.zeros_(other.model.model.layers[1].mlp.experts.down_proj)
    given = other.translate_weights(read_weights(str(tmp_path / "model")))
    assert load_into(other, given, "model") == []
    assert torch.equal(state(other), state(task))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            {"experts": None, "experts_per_token": 2},
            "task.experts_per_token is 2, and task.experts",
        ),
        ({"experts": None, "balance": "loss"}, "task.balance is loss, and task.experts is null"),
        ({"experts": None, "balance_factor": 0.1}, "task.balance_factor is 0.1, and task.experts"),
        (
            {"experts": 2, "experts_per_token": 3},
            "task.experts_per_token is 3, and task.experts is",
        ),
        ({"config": {"router_aux_loss_coef": 0.1}}, "task.config.router_aux_loss_coef is set: "),
        ({"config": {"output_router_logits": True}}, "task.config.output_router_logits is set"),
    ],
)
def test_settings_without_effect_are_refused(options: dict[str, Any], part: str) -> None:
    """Each by its name, with what to set."""
    with pytest.raises(ConfigError) as refused:
        Llama(SGD, **{"experts": 4} | options)
    assert part in str(refused.value)


def test_what_would_spoil_a_bias_is_refused(root: str, tmp_path: Path) -> None:
    """bfloat16, which rounds its steps off, and steps that are taken again."""
    begun = with_experts(balance="bias")
    with pytest.raises(ConfigError, match=r"holds the biases in torch\.bfloat16"):
        fit(begun, root, tmp_path, 2, precision="bf16-true")
    with pytest.raises(ConfigError, match=r"trainer\.halve_batch_on_oom is true"):
        fit(begun, root, tmp_path, 2, halve_batch_on_oom=True)


@pytest.mark.parametrize("option", ["pipeline", "context"])
def test_layouts_are_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which a rank has the routers of some layers, or the tokens of parts of rows."""
    sizes = {"pipeline_size": 1, "context_size": 1} | {f"{option}_size": 2}
    ranks = SimpleNamespace(**sizes)
    run = SimpleNamespace(engine=SimpleNamespace(ranks=ranks), datamodule=None)
    monkeypatch.setattr(Llama, "trainer", run)
    with pytest.raises(ConfigError, match=rf"engine\.{option} is 2, and task\.experts is set"):
        with_experts().on_fit_start()


def test_heads_are_split_and_experts_are_whole() -> None:
    """The plan of a tensor group names attention alone."""
    mesh = type("Mesh", (), {"size": lambda self: 1})()
    plan = with_experts().parallelize(mesh)
    assert set(plan) == {f"model.model.layers.*.self_attn.{name}_proj" for name in "qkvo"}


MIXTRAL = SMALL | {"vocab_size": 259, "num_local_experts": 4, "max_position_embeddings": 256}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_chat_model_with_experts_trains_alike(layout: str, tmp_path: Path) -> None:
    """On one rank and two, with accumulation, by the loss of the tokens alone."""
    torch.manual_seed(3)
    begun = ChatModel(SGD, model_type="mixtral", config=MIXTRAL, save_pretrained=False)

    def one(engine: ThreadEngine, size: int) -> Tensor:
        task = copy.deepcopy(begun)
        data = Conversations(None, max_length=128, layout=layout, batch_size=size)
        given: dict[str, Any] = {"global_batch_size": 4, "limit_val_batches": 0}
        given |= {"precision": "64-true", "lr_scaling": "none", "engine": engine}
        quiet(tmp_path, max_steps=2, **given).fit(task, datamodule=data)
        return state(task)

    (alone,) = World(1).run(partial(one, size=4))
    for result in World(2).run(partial(one, size=1)):
        torch.testing.assert_close(result, alone, rtol=0, atol=1e-12)


def test_transformers_own_loss_is_refused_or_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused where it is asked for; shown where a folder's config has it."""
    for name, value in (("output_router_logits", True), ("router_aux_loss_coef", 0.02)):
        with pytest.raises(
            ConfigError, match=rf"task\.config\.{name} is {value}, and has no effect"
        ):
            ChatModel(SGD, model_type="mixtral", config=MIXTRAL | {name: value})
    begun = ChatModel(SGD, model_type="mixtral", config=MIXTRAL)
    for asked in (False, True):
        begun.model.config.output_router_logits = asked
        begun.model.save_pretrained(tmp_path / "model")
        task = ChatModel(SGD, model=str(tmp_path / "model"), save_pretrained=False)
        data = Conversations(None, max_length=128)
        trainer = quiet(tmp_path / "run", max_steps=1, limit_val_batches=0)
        trainer.fit(task, datamodule=data)
        text = capsys.readouterr().out
        assert ("output_router_logits=true" in " ".join(text.split())) is asked
