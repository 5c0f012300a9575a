"""What trainers promise, as programs: each claim is one sentence, checked for trainkit and six
others.

    work.py       what is trained: a small model, its data, and what is recorded of a run
    trainers/     how each trainer trains it, as its documentation does
    claims/       the claims: each starts runs and compares what they recorded
    cell.py       one claim of one trainer: its runs, each in a process of its own
    worker.py     the process, or the ranks, in which a trainer's claims are checked
    suite.py      starts the workers, and collects results.json
    broken.py     trainkit broken on purpose: the suite is shown to see it
    sources.py    the public thread or page of each failure of others
    page.py       docs/conformance.md, and the same as HTML
"""
