"""Values that hooks log outside of batches: as they are, for the step or the epoch at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainkit.errors import TaskError
from trainkit.metrics.log import REDUCTIONS, Reading, Reduction, combine
from trainkit.metrics.media import Media
from trainkit.metrics.objects import EpochMetrics, is_collection, is_metric, latest_of, numbers_of


class HookLog:
    """Collects values until the hook has run on all ranks.

    Several values of one name are combined. They are rank 0's, unless they are to be reduced over
    the ranks too. Ranks may log different names.
    """

    def __init__(
        self,
        all_gather_object: Callable[[Any], list[Any]],
        put: Callable[[Mapping[str, float]], None],
        show: Callable[[Callable[[], Media]], None] = lambda make: None,
    ) -> None:
        """Build it.

        Args:
            all_gather_object: returns the values of all ranks.
            put: takes the values of an epoch, the same on all ranks.
            show: takes a function that returns what is logged beside numbers.
        """
        self._gather = all_gather_object
        self._put = put
        self.show = show
        # of each name: its numbers with their weights, how to combine them, and whether over ranks
        self.values: dict[str, tuple[list[tuple[Any, float]], Reduction, bool]] = {}
        self.prog_bar: set[str] = set()
        # by stage: how names begin and end that loggers do not get
        self._hidden: dict[str, set[tuple[str, str]]] = {}
        self.latest: dict[str, float] = {}  # what the last hook logged, the same on all ranks
        self._logged: list[Any] = []  # metric objects
        self._said: set[tuple[str, str]] = set()
        self._of_steps: set[str] = set()  # names that were logged for a step alone
        # that hold the samples of all ranks until this hook has run
        self.objects: EpochMetrics | None = None

    def add(
        self,
        name: str,
        value: Any,
        reduction: Reduction = "mean",
        over_ranks: bool = False,
        prog_bar: bool = False,
        weight: float = 1.0,
    ) -> None:
        """Take a value; `reduction` combines those of one name in a hook, and with `over_ranks` those
        of all ranks.

        Raises:
            TaskError: the value is no number, dict or tensor of numbers, or the reduction is
                unknown.
        """
        if reduction not in REDUCTIONS:
            raise TaskError(
                f"log('{name}', ...): reduce_fx is '{reduction}'; it must be one of"
                f" {', '.join(REDUCTIONS)}."
            )
        value = latest_of(value)
        if is_metric(value) or is_collection(value):
            self._logged.append(value)
            value = value.compute()
        for full, number in numbers_of(name, value).items():
            numbers = self.values[full][0] if full in self.values else []
            entry = number, weight if reduction == "mean" else 1.0
            self.values[full] = [*numbers, entry], reduction, over_ranks
            if prog_bar:
                self.prog_bar.add(full)

    def say_of(self, name: str, flag: str, text: str, say: Callable[[str], None]) -> None:
        """Say once of a value what a flag of its log() does not do."""
        if (name, flag) not in self._said:
            say(f"log('{name}', {flag}=True): {text}")
        self._said.add((name, flag))

    def ask_for_steps(self, name: str) -> None:
        """Note that a value is to be logged as a step's, which a hook of a batch alone has."""
        self._of_steps.add(name)

    def flush(self) -> None:
        """Combine the values of all ranks, hand them on, and finish the metric objects.
        Call it on all ranks.

        Raises:
            TaskError: a value was to be logged as a step's.
        """
        for name in self._of_steps:
            raise TaskError(
                f"log('{name}', on_step=True or on_epoch=False) in a hook of an epoch or of the run:"
                " it has no step. Leave it out."
            )
        own = {
            name: (
                [(how, float(number) * weight, weight) for number, weight in numbers],
                over_ranks,
            )
            for name, (numbers, how, over_ranks) in self.values.items()
        }
        self.values.clear()
        ranks: list[dict[str, tuple[list[Reading], bool]]] = self._gather(own)
        self.latest = combined = dict[str, float]()
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            first, *others = [rank[name] for rank in ranks if name in rank]
            readings, over_ranks = first
            more = [reading for other, _ in others for reading in other] if over_ranks else []
            combined[name] = combine(readings + more)
        if self.objects is not None:
            self.objects.finish()
            self.objects = None
            for metric in self._logged:
                metric.reset()
            self._logged.clear()
        if combined:
            self._put(combined)

    def hide(self, stage: str, name: str, value: Any, suffix: str) -> None:
        """Keep a value from the loggers: what a stage logs of a name, with a loader's suffix."""
        own = latest_of(value)
        is_object = is_metric(own) or is_collection(own)
        names = [name] if is_object else numbers_of(name, value)
        begins = [f"{each}{end}" for each in names for end in ("", "_step", "_epoch")]
        begins += [f"{begin}/" for begin in begins] * is_object  # the numbers of its value
        self._hidden.setdefault(stage, set()).update((begin, suffix) for begin in begins)

    def shown(self, values: dict[str, float], stage: str = "") -> dict[str, float]:
        """Return values without those that a stage, or any, has logged with `logger=False`."""
        hidden = [part for at, parts in self._hidden.items() if stage in ("", at) for part in parts]
        return {n: v for n, v in values.items() if not any(_is_of(n, *part) for part in hidden)}

    def of_step(self) -> dict[str, float]:
        """Return this rank's values, logged within a step. Waits for the device."""
        return {name: float(numbers[-1][0]) for name, (numbers, *_) in self.values.items()}

    def forget_step(self) -> None:
        """Forget the values that were logged within a step."""
        self.values.clear()
        self._of_steps.clear()


def _is_of(name: str, begin: str, suffix: str) -> bool:
    """Return whether this is the hidden name, or of a group's ("acc/") numbers."""
    return name == begin + suffix or (begin[-1:] == "/" and name.startswith(begin))
