"""Trains a copy of the head that drafts, and uses its weights when they draft better."""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from speccompile.errors import TrainingDiverged
from speccompile.runtime.learning import ServedText, TrainableHead
from speccompile.training.acceptance import JUDGED, Acceptance
from speccompile.training.kinds import kind_of, kind_of_head
from speccompile.training.online import OnlineTraining
from speccompile.training.teacher import Teacher
from speccompile.training.text_ring import TextRing, as_batch
from speccompile.utils.low_priority import start_low_priority

#: Limit of the gradient's norm.
MAX_NORM = 0.5
#: Number of judgements in the history.
HISTORY = 1024
#: Seconds between checks of a waiting thread, whether requests run and whether it must end.
LOOK_AGAIN = 0.05
#: Number of consecutive judgements without new weights after which the thread waits for another text.
PATIENCE = 20


@dataclass(frozen=True)
class Learnt:
    """Result of training.

    Args:
        steps: number of steps; fewer than requested if there are no texts to train on.
        taken: whether new weights came into use.
        before, after: acceptance on the newest texts, of the current weights and of the new ones; None without a
            judgement.
    """

    steps: int
    taken: bool = False
    before: Acceptance | None = None
    after: Acceptance | None = None


class OnlineLearner:
    """Trainer of :class:`~speccompile.training.OnlineTraining`.

    Attributes:
        history: results of the last judgements, oldest first.
        error: the error that ended the training, or None. Requests continue with the current head.
    """

    def __init__(self, trainable: TrainableHead, options: OnlineTraining) -> None:
        self._trainable, self._options = trainable, options
        head = trainable.head
        self._kind = kind = kind_of(trainable.target, options.for_head(kind_of_head(head)))
        self._live, self._copy = kind.trainable_copy(head), kind.trainable_copy(head)
        self._teacher = teacher = Teacher(trainable.target, trainable.taps)
        self._judged, self._trained = (kind.training(own, teacher) for own in (self._live, self._copy))
        self._parameters = [parameter for parameter in self._trained.parameters() if parameter.requires_grad]
        known = set(map(id, self._parameters))
        #: Names of the trained parameters in the head.
        self._names = [name for name, parameter in self._copy.named_parameters() if id(parameter) in known]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=options.learning_rate, betas=(0.9, 0.95))
        self._ring = TextRing(options.ring_tokens, options.judge_tokens)
        # Texts that are not in the ring yet. Another thread appends to it.
        self._arrived: deque[ServedText] = deque()
        self._draws = random.Random(options.seed)
        self._steps = 0
        # Number of judgements since new weights came into use or a text arrived.
        self._in_vain = 0
        # Held by the thread that trains. A thread in ``paused`` may also train.
        self._lock = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self.history: deque[Learnt] = deque(maxlen=HISTORY)
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        if options.share:
            work = _Background(weakref.ref(self), self._wake, self._stop, trainable.idle, options.share)
            self._thread = start_low_priority(work.run, "speccompile-learn")

    def collect(self, text: ServedText) -> None:
        """Receive a text that was served."""
        self._arrived.append(text)
        self._wake.set()

    def learn(self, steps: int) -> Learnt:
        """Train ``steps`` steps, judge, and use the new weights if they draft better.

        Raises:
            TrainingDiverged: the loss is not finite. The head does not change, and a later call starts from it.
        """
        with self._lock:
            made = 0
            while made < steps and self._step():
                made += 1
            return self._judge(made) if made else Learnt(0)

    def work(self) -> bool:
        """Run one step, and a judgement if it is due. Returns False if there is nothing to learn or the thread must
        end."""
        while not self._lock.acquire(timeout=LOOK_AGAIN):
            # The holder of the lock may wait for this thread to end.
            if self._stop.is_set():
                return False
        try:
            if (self._in_vain >= PATIENCE and not self._arrived) or not self._step():
                return False
            if self._steps % self._options.judge_every == 0:
                self._judge(self._options.judge_every)
            return True
        finally:
            self._lock.release()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend training and new weights within the context, except by calls of this thread. Waits for a running
        training step."""
        with self._lock:
            yield

    def save(self, folder: str | Path) -> None:
        """Write the head that is in use, in the format of ``train-head``.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            self._kind.save(self._live, Path(folder))

    def close(self, *, wait: bool) -> None:
        """Stop the training. With ``wait``, wait for the end of its thread."""
        self._stop.set()
        self._wake.set()
        if wait and self._thread is not None:
            self._thread.join()

    def _step(self) -> bool:
        while self._arrived:
            text, self._in_vain = self._arrived.popleft(), 0
            self._ring.add(replace(text, choices=self._teacher.choices(text.final)))
        texts = self._ring.sample(self._options.batch_tokens, self._draws)
        if not texts:
            return False
        self._trained.train()
        with torch.enable_grad():
            loss = self._trained(**as_batch(texts))["loss"]
            value = float(loss.detach())
            if not math.isfinite(value):
                self._begin_again()
                raise TrainingDiverged(loss=value, step=self._steps + 1, rate=f"{self._options.learning_rate:.2g}")
            self._optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_NORM)
        self._optimizer.step()
        self._steps += 1
        return True

    def _begin_again(self) -> None:
        """Restart training from the head that is in use."""
        self._copy_values(self._live, self._copy)
        self._optimizer.state.clear()

    @torch.no_grad()
    def _judge(self, steps: int) -> Learnt:
        newest = as_batch(self._ring.newest())
        before, after = (
            Acceptance.of(module.eval()(**newest)["counts"][0]) for module in (self._judged, self._trained)
        )
        taken = after.length(JUDGED) > before.length(JUDGED)
        self._in_vain = 0 if taken else self._in_vain + 1
        if taken:
            self._trainable.adopt(self._values(self._copy))
            self._copy_values(self._copy, self._live)
        elif after.length(JUDGED) < before.length(JUDGED):
            # A copy that has become worse would first need to recover before its weights can come into use.
            self._begin_again()
        # A copy that drafts equally well continues: an improvement may not show yet on so few tokens.
        self.history.append(Learnt(steps, taken, before, after))
        return self.history[-1]

    def _values(self, head: nn.Module) -> dict[str, torch.Tensor]:
        """Trained parameters of the head, by name."""
        return {name: head.get_parameter(name).detach() for name in self._names}

    def _copy_values(self, source: nn.Module, to: nn.Module) -> None:
        new = self._values(source)
        for name, value in self._values(to).items():
            value.copy_(new[name])


class _Background:
    """Work of the thread. It has only a weak reference to the learner, and ends when the learner is dropped."""

    def __init__(
        self,
        learner: weakref.ref[OnlineLearner],
        wake: threading.Event,
        stop: threading.Event,
        idle: Callable[[], bool],
        share: float,
    ) -> None:
        self._learner, self._wake, self._stop, self._idle, self._share = learner, wake, stop, idle, share

    def run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self._wake.clear()
            learner = self._learner()
            if learner is None:
                return
            try:
                trained = learner.work()
            except Exception as error:
                learner.error = error
                warnings.warn(f"the draft head learns no more: {error}", RuntimeWarning, stacklevel=1)
                return
            del learner
            if trained:
                self._rest(time.monotonic() - started)
            else:
                # The event is not set when a learner is dropped.
                self._wake.wait(1.0)

    def _rest(self, took: float) -> None:
        """Wait until the time share of training is used up, or no request runs."""
        until = time.monotonic() + took * (1 / self._share - 1)
        while not self._idle() and (left := until - time.monotonic()) > 0:
            if self._stop.wait(min(left, LOOK_AGAIN)):
                return
