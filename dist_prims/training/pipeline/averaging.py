"""Data parallel on top of a pipeline: the gradients of a stage are averaged once a step, when they are complete.

Every micro-batch adds to the gradients of a stage, in one backward or, where the weights' gradients are deferred, in
one for each weight. An averager would send all of them each time. So within a step the averagers of the stages'
parameters only accumulate, and a stage's gradients are sent after the last action that adds to them, while other stages
still work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from ...schedules.pipelines import Action
from ..gradients.ownership import averager_of

__all__: list[str] = []

# Is called with parameters whose gradients are complete; ignores the parameters of other averagers.
Complete = Callable[[Iterable[torch.Tensor]], None]


class AverageOnce:
    """Reports to the averagers of a rank's stages which gradients are complete, by the actions that are done."""

    def __init__(self, stages: Mapping[int, torch.nn.Module]) -> None:
        self._stages = stages
        self._actions_left: Counter[int] = Counter()  # actions of each stage that add to gradients
        self._uses: Counter[torch.Tensor] = Counter()  # stages that still add to the gradient of a parameter
        self._complete_functions: list[Complete] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the pipeline. Unless it raises, the gradients are means at its end."""
        parameters = [[*stage.parameters()] for stage in self._stages.values()]
        averagers = {averager_of(each) for stage in parameters for each in stage} - {None}
        self._actions_left.clear()
        self._uses = Counter(each for stage in parameters for each in stage)
        with ExitStack() as stack:
            # At the end of the step each averager sends what is left: in the opposite order of the names, which is the
            # same on all ranks. With unlike orders two ranks would wait for each other.
            for averager in sorted((each for each in averagers if each), key=lambda each: each.name):
                self._complete_functions.append(stack.enter_context(averager.once()))
            stack.callback(self._complete_functions.clear)
            yield

    def expect(self, actions: Iterable[Action]) -> None:
        """The actions of this rank in the step."""
        if self._complete_functions:
            self._actions_left = Counter(action.stage for action in actions if action.kind != "F")

    def done(self, action: Action) -> None:
        """Count an action; send the gradients that are complete now."""
        if action.kind == "F" or not self._complete_functions:
            return
        self._actions_left[action.stage] -= 1
        if self._actions_left[action.stage]:
            return
        self._uses.subtract(parameters := [*self._stages[action.stage].parameters()])
        complete = [each for each in reversed(parameters) if not self._uses[each]]  # the order of backward
        for complete_function in self._complete_functions:
            complete_function(complete)
