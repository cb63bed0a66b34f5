"""``wrap(learn=OnlineTraining(...))``: train the draft head on the texts that are served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from speccompile.training.text_options import Number
from speccompile.training.train_options import OF_KINDS, TrainOptions
from speccompile.utils.options import Options, WholeNumber, option

if TYPE_CHECKING:
    from speccompile.runtime.learning import TrainableHead
    from speccompile.training.online_learner import OnlineLearner


@dataclass(frozen=True)
class OnlineTraining(Options):
    """Options for training a head while requests are served.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "OnlineTraining"

    share: float = field(
        default=0.1,
        metadata=option(
            "Share of the time in which one thread of low priority trains while requests run. While no request runs, "
            "it trains all the time, until 20 judgements in a row kept the head. With 0 only `spec.learn(steps)` "
            "trains.",
            Number(0, 1),
        ),
    )
    learning_rate: float = field(default=3e-4, metadata=option("Learning rate of AdamW.", Number(0)))
    batch_tokens: int = field(default=512, metadata=option("Most tokens of a training step.", WholeNumber(8)))
    unroll: int = field(
        default=3, metadata=option("Draft steps that are trained in a row; not of a block drafter.", WholeNumber(1))
    )
    decay: float = field(
        default=0.8, metadata=option("Weight of a draft step's loss relative to the one before.", Number(0, 1))
    )
    ring_tokens: int = field(
        default=16384, metadata=option("Tokens of the newest texts that are kept to train on.", WholeNumber(16))
    )
    judge_tokens: int = field(
        default=1024,
        metadata=option(
            "Tokens of the newest texts on which heads are judged before they are trained on these.", WholeNumber(8)
        ),
    )
    judge_every: int = field(
        default=10, metadata=option("Training steps after which new weights are judged.", WholeNumber(1))
    )
    seed: int = field(default=0, metadata=option("Seed of the choice of texts.", WholeNumber(0)))

    def for_head(self, kind: str) -> TrainOptions:
        """Options of the training of a head of this kind, which exists already."""
        given: dict[str, Any] = {"decay": self.decay, "seed": self.seed}
        if kind in OF_KINDS["unroll"]:
            given["unroll"] = self.unroll
        return TrainOptions(kind=kind, start="random", **given)

    def start(self, trainable: TrainableHead) -> OnlineLearner:
        """Start to train ``trainable``, in a separate thread unless ``share`` is 0."""
        from speccompile.training.online_learner import OnlineLearner

        return OnlineLearner(trainable, self)


if __name__ == "__main__":
    print(OnlineTraining.table())
