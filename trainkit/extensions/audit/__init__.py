"""Audit: callbacks=audit finds silent corruption, and names the rank and the module that is wrong.

audit.py      the callback: when a microbatch is computed again, and what happens then
again.py      records a microbatch of a rank, and computes it again on any rank
verdict.py    whose numbers are wrong, from the numbers of all ranks
values.py     fingerprints of the tensors of a microbatch
"""

from trainkit.extension import Extension

_AUDIT = "trainkit.extensions.audit.audit.Audit"

EXTENSION = Extension(
    name="audit",
    summary="callbacks=audit: silent corruption is detected; rank and module are named",
    proven="each commit; on a GPU not yet",
    targets=(_AUDIT,),
    names={"trainkit.callbacks.Audit": _AUDIT, "trainkit.callbacks.audit.Audit": _AUDIT},
)
