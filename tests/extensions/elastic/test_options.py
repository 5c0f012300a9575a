"""Settings of an elastic job from horovodrun's command line, and its hosts and addresses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.elastic import driver, network
from trainkit.extensions.elastic.hosts import Discovery, parse
from trainkit.extensions.elastic.network import (
    FINDS_INTERFACE,
    Network,
    choose,
    worker_interface,
)
from trainkit.extensions.elastic.options import Settings, settings_of, worker_environment
from trainkit.launch import elastic


def settings(
    environ: dict[str, str] | None = None, typed: Sequence[str] = (), **given: Any
) -> Settings:
    """Return the settings of a command line."""
    defaults: dict[str, Any] = {
        "num_proc": 2,
        "min_num_proc": None,
        "max_num_proc": None,
        "elastic_timeout": None,
        "reset_limit": None,
        "cooldown_range": None,
        "slots": None,
        "host_discovery_script": None,
        "hosts": None,
        "nics": None,
        "ssh_port": None,
        "ssh_identity_file": None,
        "output_filename": None,
        "prefix_output_with_timestamp": False,
        "verbose": False,
        "command": ["python", "train.py"],
        "run_func": None,
    }
    return settings_of(argparse.Namespace(**defaults | given), environ or {}, typed)


def test_the_defaults_are_horovodruns() -> None:
    """min-np is np, no limits, ten minutes, this host alone."""
    one = settings()
    assert (one.rules.np, one.rules.min_np, one.rules.max_np, one.rules.reset_limit) == (
        2,
        2,
        None,
        None,
    )
    assert (one.rules.timeout_s, one.rules.pause_s) == (600.0, (1.0, 60.0))
    assert not one.rules.cools_down
    assert one.hosts == {"localhost": 2} and one.command == ("python", "train.py")


def test_an_elastic_job_is_not_mpis() -> None:
    """--mpi would start other ranks than it says."""
    with pytest.raises(
        ConfigError,
        match=r"--mpi is given, and --min-np or .* Leave --mpi out: elastic jobs run on Gloo",
    ):
        settings(min_num_proc=1, use_mpi=True)


def test_all_options_are_heard() -> None:
    """Each option sets its field."""
    one = settings(
        num_proc=3,
        min_num_proc=2,
        max_num_proc=4,
        elastic_timeout=5,
        reset_limit=0,
        cooldown_range=[3, 9],
        hosts="a:2,b:4",
        nics={"eth1", "eth0"},
        ssh_port=2222,
        ssh_identity_file="key",
        output_filename="out",
        prefix_output_with_timestamp=True,
        verbose=True,
        command=["--", "python", "train.py"],
    )
    rules = one.rules
    assert (rules.np, rules.min_np, rules.max_np, rules.timeout_s, rules.reset_limit) == (
        3,
        2,
        4,
        5.0,
        0,
    )
    assert (
        (rules.pause_s, rules.cools_down) == ((3.0, 9.0), True)
        and one.hosts == {"a": 2, "b": 4}
        and one.interfaces == ("eth0", "eth1")
    )
    assert (one.ssh_port, one.ssh_identity_file, one.output) == (2222, "key", Path("out"))
    assert one.with_time and one.verbose and one.command == ("python", "train.py")


def test_the_timeout_can_come_from_the_environment() -> None:
    """HOROVOD_ELASTIC_TIMEOUT applies if the option is not given."""
    environ = {"HOROVOD_ELASTIC_TIMEOUT": "77"}
    assert settings(environ).rules.timeout_s == 77
    assert settings(environ, elastic_timeout=5).rules.timeout_s == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_proc": None}, "-np is None"),
        ({"min_num_proc": 3}, "--min-np is 3; it must be from 1 to -np, which is 2"),
        ({"min_num_proc": 0}, "--min-np is 0"),
        ({"max_num_proc": 1}, "--max-np is 1; it must be at least -np"),
        ({"reset_limit": -1}, "--reset-limit is -1"),
        ({"slots": 0}, "--slots-per-host is 0"),
        ({"cooldown_range": [5, 2]}, "--blacklist-cooldown-range is 5 2"),
        ({"cooldown_range": [0, 2]}, "--blacklist-cooldown-range is 0 2"),
        ({"elastic_timeout": 0}, "--elastic-timeout is '0'"),
        ({"start_timeout": 9}, "--start-timeout is 9, and an elastic job has none"),
        ({"hosts": "a:x"}, "--hosts says 'a:x'"),
        ({"command": []}, "no command"),
        ({"run_func": print}, "no elastic mode"),
    ],
)
def test_what_is_not_legal_is_refused(given: dict[str, Any], message: str) -> None:
    """By the option's name and value."""
    with pytest.raises(ConfigError, match=message):
        settings(**given)


def test_a_timeout_in_the_environment_that_is_no_number_is_refused() -> None:
    """By the variable's name."""
    with pytest.raises(ConfigError, match="HOROVOD_ELASTIC_TIMEOUT is 'soon'"):
        settings({"HOROVOD_ELASTIC_TIMEOUT": "soon"})


@pytest.mark.parametrize(("value", "passes_on"), [(None, True), ("", True), ("trainkit", False)])
def test_a_job_is_passed_on_unless_the_variable_keeps_it(
    value: str | None, passes_on: bool
) -> None:
    """TRAINKIT_ELASTIC_DRIVER=trainkit keeps a script that calls hvd.init() itself."""
    assert (
        settings({} if value is None else {"TRAINKIT_ELASTIC_DRIVER": value}).passes_on is passes_on
    )


def test_a_driver_that_does_not_exist_is_refused() -> None:
    """By the variable's name, with the legal values."""
    with pytest.raises(
        ConfigError, match="TRAINKIT_ELASTIC_DRIVER is 'upstream'; it must be 'trainkit', 'horovod'"
    ):
        settings({"TRAINKIT_ELASTIC_DRIVER": "upstream"})


def test_horovodrun_gets_no_driver_where_horovods_own_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its _run_elastic takes None for trainkit's absence;
    a bad value gets trainkit's driver, which refuses it.
    """
    pytest.importorskip("horovod")
    for value, expected in (
        ("horovod", None),
        ("trainkit", driver.run_elastic),
        ("stock", driver.run_elastic),
    ):
        monkeypatch.setenv("TRAINKIT_ELASTIC_DRIVER", value)
        assert elastic.run_elastic is expected


def test_workers_do_not_inherit_another_jobs_rank() -> None:
    """A driver inside a worker of another job; and stock elastic mode stays off."""
    environ = {
        "HOROVOD_ELASTIC": "1",
        "TRAINKIT_WORKER": "x",
        "HOROVOD_RENDEZVOUS_SCOPE": "g3.",
        "HOROVOD_CYCLE_TIME": "2",
    }
    expected = {"HOROVOD_CYCLE_TIME": "2", "A": "b", FINDS_INTERFACE: "1"}
    assert worker_environment(settings(environ), {"A": "b"}) == expected


def test_hosts_keep_their_order() -> None:
    """Lines or commas, numbers or the default; a host with no slots is left out."""
    assert list(parse("b:2\n a \n\nc:0\na-1.x:1\n", 3, "script").items()) == [
        ("b", 2),
        ("a", 3),
        ("a-1.x", 1),
    ]
    assert parse("a", None, "script") == {"a": 1}


@pytest.mark.parametrize(
    "line", ["a:", ":2", "a:b", "a:-1", "a b:1", "-oProxyCommand=x:1", "a:1:2"]
)
def test_a_line_that_is_no_host_is_refused(line: str) -> None:
    """It is quoted; an option of ssh's is no host."""
    with pytest.raises(ConfigError, match="script says"):
        parse(line, None, "script")


def test_a_discovery_script_that_fails_says_why() -> None:
    """The message has the exit code and its stderr."""
    with pytest.raises(
        ConfigError, match="ended with exit code 3.*Its error output: no such cluster"
    ):
        Discovery("echo no such cluster >&2; exit 3", None).ask()
    assert Discovery("echo a:2", None).ask() == {"a": 2}


def test_a_discovery_script_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as failed."""
    monkeypatch.setattr("trainkit.extensions.elastic.hosts.TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="took more than 0.1 s"):
        Discovery("sleep 60", None).ask()


def test_jobs_on_this_host_meet_at_the_loopback() -> None:
    """No other host can connect."""
    assert choose(["localhost", "127.0.0.2"], ()) == Network("127.0.0.1", ("lo",), is_closed=True)


def test_an_interface_that_was_chosen_is_taken() -> None:
    """By its address."""
    assert choose(["localhost"], ["lo"]) == Network("127.0.0.1", ("lo",))


def test_other_hosts_are_met_at_the_interface_that_leads_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system's own choice of way;
    here it leads through the loopback, as there may be no other.
    """
    monkeypatch.setattr(network, "is_local", lambda host: False)
    assert choose(["127.0.0.9"], ()) == Network("127.0.0.1", ("lo",))
    with pytest.raises(ConfigError, match="no route to host 'nowhere.invalid'"):
        choose(["nowhere.invalid"], ())


def test_each_host_has_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job ends before anything is started, whichever host it is; ssh would try for ten minutes.
    Its aliases are legal.
    """
    job = settings(hosts="192.0.2.1:1,nowhere.invalid:1", nics={"lo"})
    with pytest.raises(
        ConfigError,
        match="--hosts names 'nowhere.invalid', of which no address can be looked up here",
    ):
        driver.run(job)
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho hostname 192.0.2.2\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    network.check_names(["192.0.2.1", "nowhere.invalid"])


def test_the_driver_listens_at_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node's may be bond0 where the hosts' are eth0;
    the hosts' names are not looked for here.
    """
    assert choose(["localhost"], ["fast0", "fast1"], "lo") == Network(
        "127.0.0.1", ("fast0", "fast1")
    )
    assert choose(["localhost"], [], "lo") == Network("127.0.0.1", ("lo",))
    with pytest.raises(
        ConfigError, match=r"'fast0', .* --network-interfaces driver=NAME, or driver=NAME,NAME\.$"
    ):
        choose(["localhost"], ["fast0"])


@pytest.mark.parametrize(
    ("typed", "interfaces", "driver"),
    [
        (["--network-interfaces", "eth1,eth0"], ("eth1", "eth0"), None),
        (["--network-interface=eth1", "--network-interface", "eth0"], ("eth1", "eth0"), None),
        (["--network-interfaces=driver=bond0,eth1,eth0"], ("eth1", "eth0"), "bond0"),
        (["--network-interfaces", "driver=bond0"], (), "bond0"),
        ([], (), None),
    ],
)
def test_interfaces_are_taken_in_order(
    typed: list[str], interfaces: tuple[str, ...], driver: str | None
) -> None:
    """Gloo uses the first of the workers'; horovodrun's parser returns a set."""
    words = (
        ",".join(typed)
        .replace("--network-interfaces=", "")
        .replace("--network-interface=", "")
        .split(",")
    )
    names = {word for word in words if word and not word.startswith("--")}  # as its parser has them
    one = settings(
        nics=names or None, typed=["horovodrun", "-np", "2", *typed, "python", "train.py"]
    )
    assert (one.interfaces, one.driver_interface) == (interfaces, driver)


def test_two_interfaces_for_the_driver_are_refused() -> None:
    """It listens at one."""
    with pytest.raises(ConfigError, match="names bond0 and bond1 for the driver"):
        settings(nics={"driver=bond0", "driver=bond1"})


@pytest.mark.parametrize("nics", [None, {"lo"}])
def test_nccls_interface_is_the_users(nics: set[str] | None) -> None:
    """NCCL_SOCKET_IFNAME may name InfiniBand's where Gloo has another one: it stays, whether the
    worker finds an interface or horovodrun has named one.
    """
    one = settings(nics=nics)
    given = {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    given["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
    environ = worker_environment(one, given)
    assert (environ | worker_interface(environ))["NCCL_SOCKET_IFNAME"] == "lo"
    own = replace(one, environ={**one.environ, "NCCL_SOCKET_IFNAME": "ib0"})
    environ = worker_environment(own, given)
    assert (environ | worker_interface(environ))["NCCL_SOCKET_IFNAME"] == "ib0"


def test_a_worker_finds_the_interface_that_leads_to_the_driver() -> None:
    """Whatever the driver's own is called;
    but one that the user has named is taken, and must be here.
    """
    given = {"HOROVOD_GLOO_IFACE": "bond0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    environ = worker_environment(settings(), given)
    assert worker_interface(environ) == {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    named = worker_environment(settings(nics={"bond0"}), given)
    with pytest.raises(
        ConfigError, match="--network-interface is 'bond0', which has no IPv4 address here"
    ):
        worker_interface(named)
    assert (
        worker_interface(
            worker_environment(settings(nics={"lo"}), given | {"HOROVOD_GLOO_IFACE": "lo"})
        )
        == {}
    )
