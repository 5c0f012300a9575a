"""Balance: faster ranks take larger microbatches,
and the step stays the same (docs/communication.md).
"""

from trainkit.extension import Extension

_BALANCE = "trainkit.extensions.balance.callback.Balance"

EXTENSION = Extension(
    name="balance",
    summary="callbacks=balance: faster ranks take larger microbatches of the same step",
    proven="each commit",
    targets=(_BALANCE,),
    names={"trainkit.callbacks.Balance": _BALANCE, "trainkit.callbacks.balance.Balance": _BALANCE},
)
