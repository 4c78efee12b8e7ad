"""Both optimizers of a model as one: which parameter goes where, and the steps taken together."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from lipnext_scale.models import BlockGroup
from lipnext_scale.optim.lookahead_nadam import LookaheadNAdam
from lipnext_scale.optim.manifold_adam import ManifoldAdam
from lipnext_scale.utils.config import ConfigError, changeable

# --------------------------------------------------------------------------------------------------
# The learning rate as a pure function of the step.


def learning_rate(
    step: int, lr: float, total_steps: int, warmup_steps: int, final_ratio: float
) -> float:
    """Linear warm-up to `lr`, then a half cosine down to `lr·final_ratio` at the last step.

    `step` counts the steps already taken, so the first one has lr/warmup_steps, never 0.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return lr * (final_ratio + (1 - final_ratio) * cosine)


@dataclass(frozen=True)
class OptimConfig:
    """Manifold Adam for the orthogonal matrices, NAdam for the rest, one schedule for both."""

    lr: float = 1e-3
    euclidean_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lookahead: int = 6
    second_moment_init: Literal["paper", "zero"] = "zero"
    # fp32 products: orders of the exponential by the paper's thresholds, or by a proven bound.
    exp_rule: Literal["paper", "bounded"] = "bounded"
    # What is learned of a block's (R, W): R and M with W = M·Rᵀ as in the paper, or R and W.
    parametrisation: Literal["product", "merged"] = "product"
    # Products of the manifold step. tensor_core: bf16 operands; auto: on CUDA.
    products: Literal["auto", "fp32", "tensor_core"] = changeable("auto")
    # The polar retraction at each epoch's end (Algorithm 2, lines 20 to 22).
    retract_each_epoch: bool = True
    # Steps between other ones; 0: none.
    retract_every: int = 0
    clip_norm: float = 3.0
    epochs: int = 800
    warmup_epochs: float = 20
    final_lr_ratio: float = 1e-5

    def __post_init__(self) -> None:
        if not self.eps >= 1e-30:
            raise ConfigError("eps", self.eps, "must be at least 1e-30, or float32 loses it")
        for key in ("lr", "euclidean_lr", "clip_norm"):
            if getattr(self, key) <= 0:
                raise ConfigError(key, getattr(self, key), "must be positive")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("betas", self.betas, "must both be in [0, 1)")
        for key in ("lookahead", "retract_every"):
            if getattr(self, key) < 0:
                raise ConfigError(key, getattr(self, key), "must be 0 (off) or a number of steps")
        if self.epochs < 1:
            raise ConfigError("epochs", self.epochs, "must be at least 1")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ConfigError(
                "warmup_epochs",
                self.warmup_epochs,
                f"must be from 0 to below epochs = {self.epochs}",
            )
        if not 0 <= self.final_lr_ratio <= 1:
            raise ConfigError("final_lr_ratio", self.final_lr_ratio, "must be in [0, 1]")


class ManifoldOptimizer(Protocol):
    """The interface of ManifoldAdam and of its counterpart for sharded rows."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Any]: ...

    def step(self, *, scale: Tensor | None = None, usable: Tensor | None = None) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def retract(self) -> None: ...

    def slow_weights(self) -> AbstractContextManager[None]: ...

    def initialise_state(self) -> None: ...

    def state_loaded(self) -> None: ...

    def set_step(self, step: int) -> None: ...


class Optimizers:
    """Manifold Adam for the orthogonal matrices and LookaheadNAdam for the rest.

    parameters: (orthogonal, euclidean), such as `split_parameters` gives them of a model.
    build_manifold: makes the former from named parameters and ManifoldAdam's arguments.
    """

    def __init__(
        self,
        parameters: "tuple[NamedTensors, NamedTensors]",
        config: OptimConfig,
        build_manifold: Callable[..., ManifoldOptimizer] = ManifoldAdam,
    ) -> None:
        orthogonal, euclidean = parameters
        self.config = config
        if not orthogonal:  # of a layer that is none by itself; torch refuses an empty list
            build_manifold, orthogonal = ManifoldAdam, [{"params": []}]  # type: ignore[list-item]
        self.manifold = build_manifold(
            orthogonal,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            lookahead=config.lookahead,
            second_moment_init=config.second_moment_init,
            exp_rule=config.exp_rule,
            retract_every=config.retract_every,
            parametrisation=config.parametrisation,
            products=config.products,
        )
        self.euclidean = LookaheadNAdam(
            euclidean,
            lr=config.euclidean_lr,
            betas=config.betas,
            eps=config.eps,
            lookahead=config.lookahead,
        )

    def set_learning_rate(self, step: int, total_steps: int, warmup_steps: int) -> float:
        """Put both on the schedule; returns the learning rate of what makes the matrices."""
        for optimizer, lr in (
            (self.manifold, self.config.lr),
            (self.euclidean, self.config.euclidean_lr),
        ):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(
                    step, lr, total_steps, warmup_steps, self.config.final_lr_ratio
                )
        learned = self.manifold if self.manifold.param_groups[0]["params"] else self.euclidean
        return float(learned.param_groups[0]["lr"])

    def step(self, scale: Tensor | None = None, usable: Tensor | None = None) -> None:
        """scale: of all gradients. usable: false moves nothing, without the host's knowledge."""
        self.manifold.step(scale=scale, usable=usable)
        self.euclidean.step(scale=scale, usable=usable)

    def zero_grad(self) -> None:
        self.manifold.zero_grad(set_to_none=True)
        self.euclidean.zero_grad(set_to_none=True)

    def retract(self) -> None:
        """At an epoch's end: matrices back onto O(d), and all slow weights jump to the fast ones.

        Algorithm 2 does so with the matrices. The other parameters follow, so that the slow weights
        are always one network that the training has seen, not parts of two.
        """
        self.manifold.retract()
        self.euclidean.synchronise()

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """Inside, the model is the algorithm's output (Xslow): for evaluation and export."""
        with ExitStack() as stack:
            stack.enter_context(self.manifold.slow_weights())
            stack.enter_context(self.euclidean.slow_weights())
            yield

    def initialise_state(self) -> None:
        """Create all state of the first step: something to load a checkpoint into."""
        self.manifold.initialise_state()
        self.euclidean.initialise_state()

    def counters(self) -> dict[str, float]:
        """The state beside tensors: NAdam's running product, the same for every parameter.

        The run itself counts the steps.
        """
        products = {float(state["mu_product"]) for state in self.euclidean.state.values()}
        assert len(products) <= 1, "all parameters take their steps together"
        return {"mu_product": products.pop()} if products else {}

    def set_counters(self, step: int, counters: dict[str, float]) -> None:
        self.set_step(step)
        for state in self.euclidean.state.values():
            state["mu_product"].fill_(counters["mu_product"])

    def set_step(self, step: int) -> None:
        """How many updates both have made."""
        self.manifold.set_step(step)
        self.euclidean.set_step(step)


NamedTensors = Sequence[tuple[str, Tensor]]
NamedParameters = list[tuple[str, nn.Parameter]]


def split_parameters(model: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """(orthogonal, euclidean): every trainable parameter of the model in exactly one of the two."""
    groups = [module for module in model.modules() if isinstance(module, BlockGroup)]
    banks = {id(p) for group in groups for p in group.orthogonal_parameters()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    orthogonal = [(name, p) for name, p in named if id(p) in banks]
    euclidean = [(name, p) for name, p in named if id(p) not in banks]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    placed = [id(p) for _, p in orthogonal + euclidean]
    assert len(placed) == len(set(placed)) and set(placed) == trainable, (
        "every trainable parameter must be in exactly one group"
    )
    if not orthogonal and all(group.family is None for group in groups):
        raise ValueError("the model has no trainable bank of orthogonal matrices")
    return orthogonal, euclidean
