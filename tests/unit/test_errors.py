"""The error tree."""

from __future__ import annotations

from trainkit import errors


def test_every_error_is_a_trainkit_error() -> None:
    """One `except TrainkitError` catches all; exit code 2 means that nothing was started."""
    tree = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, errors.TrainkitError) for e in tree)
    assert {e for e in tree if e.exit_code == 2} == {errors.ConfigError, errors.NoCheckpointError}
    assert all(issubclass(e, errors.ConfigError) for e in tree if e.exit_code == 2)


def test_a_reason_within_a_sentence_has_no_full_stop() -> None:
    """Of an error of others that ends with one, one full stop is left: the sentence's own."""
    reasons = (ValueError("It is broken."), "it is broken\n")
    assert [errors.clause(reason) for reason in reasons] == ["It is broken", "it is broken"]


def test_only_a_near_name_is_suggested() -> None:
    """A suggestion is made if a name is near, and none otherwise."""
    assert (
        errors.did_you_mean("max_epoch", ["max_epochs", "max_steps"])
        == " Did you mean 'max_epochs'?"
    )
    assert errors.did_you_mean("zzz", ["max_epochs"]) == ""
    assert (
        errors.did_you_mean("epochs", ["min_epochs", "max_epochs"]) == " Did you mean 'max_epochs'?"
    )
    assert errors.did_you_mean("learning_rate", ["lr", "momentum"]) == " Did you mean 'lr'?"
