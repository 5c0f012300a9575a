"""Which engine has which option, and the message of one that lacks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.signature import read_signature
from trainkit.engine.options import HorovodSums, refusals
from trainkit.engine.select import auto_engine, make_engine, target_of
from trainkit.errors import ConfigError

TARGETS = {
    "single": "trainkit.engine.single.SingleEngine",
    "horovod": "trainkit.engine.horovod.engine.HorovodEngine",
    "ddp": "trainkit.engine.ddp.engine.DDPEngine",
    "fsdp": "trainkit.extensions.fsdp.engine.FSDPEngine",
    "deepspeed": "trainkit.extensions.deepspeed.engine.DeepSpeedEngine",
}


def options_of(engine: str) -> set[str]:
    """The arguments of an engine's constructor, read from its source:
    Horovod need not be installed.
    """
    return set(read_signature(TARGETS[engine], "engine").parameters)


@pytest.mark.parametrize("engine", TARGETS)
def test_every_option_works_or_is_refused_with_a_reason(engine: str) -> None:
    """An option that one engine has and another lacks has a reason there,
    and no engine refuses its own options.
    """
    everything = set().union(*map(options_of, TARGETS))
    assert len(everything) >= 14
    assert set(refusals(engine)) == everything - options_of(engine)


@pytest.mark.parametrize(
    ("engine", "option", "words"),
    [
        (
            "ddp",
            {"num_groups": 2},
            r"engine\.num_groups: the engine is 'ddp'.*set their size with engine\.bucket_cap_mb",
        ),
        ("ddp", {"groups": [["a"]]}, r"engine\.groups: .*engine\.bucket_cap_mb"),
        (
            "ddp",
            {"fusion_threshold_mb": 8},
            r"engine\.fusion_threshold_mb: .*no background thread.*engine\.bucket_cap_mb",
        ),
        ("ddp", {"autotune": True}, r"engine\.autotune: .*engine\.bucket_cap_mb"),
        ("ddp", {"cycle_time_ms": 1.0}, r"engine\.cycle_time_ms: .*Leave it out here"),
        ("ddp", {"optimizer_wrapper": "horovod"}, r"engine\.optimizer_wrapper is not a setting\."),
        (
            "single",
            {"compression": "fp16"},
            r"engine\.compression: the engine is 'single'.*no gradients to sum",
        ),
        ("single", {"process_set": [0]}, r"engine\.process_set: .*no others to choose from"),
        (
            "ddp",
            {"cpu_offload": True},
            r"engine\.cpu_offload: the engine is 'ddp'.*engine=fsdp, started by torchrun",
        ),
        (
            "single",
            {"replicas": 2},
            r"engine\.replicas: the engine is 'single'.*weights are whole there",
        ),
        (
            "fsdp",
            {"compression": "fp16"},
            r"engine\.compression: the engine is 'fsdp'.*engine\.param_dtype",
        ),
        ("fsdp", {"bucket_cap_mb": 1}, r"engine\.bucket_cap_mb: .*engine\.shard"),
        ("fsdp", {"replicas": 0}, r"engine\.replicas is 0; it must be a whole number, 1 or more"),
        (
            "fsdp",
            {"param_dtype": "fp8"},
            r"engine\.param_dtype is 'fp8'; it must be one of 'bf16', 'fp16'",
        ),
        (
            "ddp",
            {"op": "adasum"},
            r"engine\.op is 'adasum', which is Horovod's.*use engine\.op=average",
        ),
        (
            "ddp",
            {"compression": "fp8"},
            r"engine\.compression is 'fp8'; it must be one of 'none', 'fp16', 'bf16'",
        ),
        (
            "ddp",
            {"gradient_predivide_factor": 0},
            r"engine\.gradient_predivide_factor is 0; it must be a number above 0",
        ),
        (
            "ddp",
            {"bucket_cap": 1},
            r"engine\.bucket_cap is not a setting\. Did you mean 'bucket_cap_mb'\?",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    engine: Any, option: dict[str, Any], words: str
) -> None:
    """The message names the option, the engine, the reason and what to use."""
    with pytest.raises(ConfigError, match=words):
        make_engine(engine, **option)


def sums(**options: Any) -> HorovodSums:
    """Horovod's sums with the defaults of the engine."""
    defaults = {"compression": "none", "op": "average", "predivide": 1.0}
    return HorovodSums(
        **defaults | {"num_groups": None, "groups": None, "process_set": None} | options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"compression": "bf16"},
            (
                r"engine\.compression is 'bf16', but Horovod .*Use engine\.compression=fp16, or"
                r" engine=ddp"
            ),
        ),
        (
            {"num_groups": 2, "groups": [["a"]]},
            r"engine\.num_groups is 2, and engine\.groups is given too\. Set only one",
        ),
        (
            {"op": "adasum", "predivide": 2.0},
            r"engine\.gradient_predivide_factor is 2\.0, but engine\.op is 'adasum'",
        ),
        (
            {"op": "adasum", "process_set": [0]},
            r"engine\.process_set is \[0\], but engine\.op is 'adasum'",
        ),
    ],
)
def test_options_of_horovod_that_exclude_each_other_are_refused(
    options: dict[str, Any], words: str
) -> None:
    """Options that Horovod lacks, or that have no effect, are refused before it starts."""
    sums()
    with pytest.raises(ConfigError, match=words):
        sums(**options)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "engine.compression=fp16",
            (
                "engine.compression: this launcher's engine is 'single', where it has no effect:"
                " one process"
            ),
        ),
        (
            "engine=ddp engine.cache_capacity=1",
            "engine.cache_capacity: the engine is 'ddp', where it has no effect",
        ),
        (
            "engine=ddp engine.compression=half",
            "engine.compression is 'half'; it must be one of 'none', 'fp16', 'bf16'",
        ),
        ("engine=ddp engine.op=1", "engine.op is 1; it must be one of 'average', 'sum', 'adasum'"),
        (
            "engine=ddp engine.process_set=[a]",
            "engine.process_set is ['a']; it must be a list of which each is a whole number",
        ),
        (
            "engine.bucket=1",
            "engine.bucket is not a setting. Did you mean 'bucket_cap_mb'? Known here: device",
        ),
    ],
)
def test_a_config_is_checked_against_the_engine_that_it_gets(
    overrides: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch is loaded, with engine=auto too, and with the same reasons."""
    monkeypatch.chdir(tmp_path)
    assert main("fit", ["conf=mlp", *overrides.split()]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_auto_is_checked_against_the_launchers_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun engine=auto has the options of ddp."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    target, refused = target_of("trainkit.engine.select.auto_engine")
    assert target == TARGETS["ddp"]
    assert refused["num_groups"].startswith("this launcher's engine is 'ddp'")
    assert target_of("my.Engine") == ("my.Engine", {})
    with pytest.raises(
        ConfigError, match=r"engine\.num_groups is 3, and this launcher's engine is 'ddp'"
    ):
        auto_engine(num_groups=3)
