"""Losses for certified training: EMMA as the paper trains, and those it is compared with.

All see the same inputs: logits [N, J]; labels [N]; `distances` [J, J], c_ij = ‖w_i - w_j‖ of the
normalised head rows, computed once per step for all pairs; and the training radius ε. The backbone
is 1-Lipschitz, so a perturbation of norm ε raises logit_j - logit_y by at most ε·c_yj.

`logit_scale` multiplies the logits inside the loss only. Unit head rows on small images give logits
too small for cross-entropy; a certificate is a ratio of logits and distances and never sees the
scale.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lipnext_scale.utils.config import ConfigError

LossName = Literal["emma", "margin", "trades", "logit_annealing", "cross_entropy"]


@dataclass(frozen=True)
class LossConfig:
    name: LossName = "emma"
    # The radius that the model is to be certified at, and its schedule: ε_train(epoch) =
    # ε·(r_min + (r_max - r_min)·min(1, 2·epoch/epochs)).
    epsilon: float = 36 / 255
    radius_min: float = 0.1
    radius_max: float = 3.0
    logit_scale: float = 1.0
    trades_weight: float = 1.0
    annealing_temperature: float = 0.75
    annealing_offset: float = 2.0
    annealing_power: float = 5.0

    def __post_init__(self) -> None:
        if self.name not in get_args(LossName):
            raise ConfigError("name", self.name, f"must be one of {', '.join(get_args(LossName))}")
        for key in ("epsilon", "radius_min", "radius_max", "trades_weight", "annealing_power"):
            if getattr(self, key) < 0:
                raise ConfigError(key, getattr(self, key), "must be at least 0")
        for key in ("logit_scale", "annealing_temperature"):
            if getattr(self, key) <= 0:
                raise ConfigError(key, getattr(self, key), "must be positive")
        if self.radius_min > self.radius_max:
            raise ConfigError(
                "radius_min", self.radius_min, f"must be at most radius_max = {self.radius_max:g}"
            )


def training_radius(config: LossConfig, epoch: float, epochs: float) -> float:
    """ε_train: grows linearly over the first half of the training, then stays."""
    progress = min(1.0, 2 * epoch / epochs)
    return config.epsilon * (config.radius_min + (config.radius_max - config.radius_min) * progress)


def class_distances(weight: Tensor) -> Tensor:
    """c_ij = ‖w_i - w_j‖ from one product, √(|w_i|² + |w_j|² - 2w_i·w_j), exactly 0 for i = j.

    The square root has no gradient at 0, so what round-off leaves there is cut off first.
    """
    squares = weight.square().sum(-1)
    squared = squares[:, None] + squares[None, :] - 2 * weight @ weight.mT
    apart = ~torch.eye(len(weight), dtype=torch.bool, device=weight.device) & (squared > 1e-12)
    return torch.where(apart, squared, 1.0).sqrt() * apart


def emma_loss(
    logits: Tensor, labels: Tensor, distances: Tensor, epsilon: float, logit_scale: float = 1.0
) -> Tensor:
    """Efficient Margin MAximisation: cross-entropy after the attack that each class can still make.

    With l_j = logit_j - logit_y, e_j = clip(-l_j/(ε·c_j), 0.01, 1) is the share of the radius that
    class j would need to overtake y; the logits are shifted by e_j·ε·c_j with e_j held constant.
    """
    return F.cross_entropy(logit_scale * emma_logits(logits, labels, distances, epsilon), labels)


def emma_logits(logits: Tensor, labels: Tensor, distances: Tensor, epsilon: float) -> Tensor:
    relative = logits - logits.gather(1, labels[:, None])
    reach = epsilon * distances[labels]
    share = (-relative / reach.clamp_min(1e-8)).clamp(0.01, 1).detach()
    return relative + share * reach


def margin_loss(
    logits: Tensor, labels: Tensor, distances: Tensor, epsilon: float, logit_scale: float = 1.0
) -> Tensor:
    """Cross-entropy after the whole radius is given to every other class: logit_j + ε·c_yj."""
    return F.cross_entropy(logit_scale * (logits + epsilon * distances[labels]), labels)


def trades_loss(
    logits: Tensor,
    labels: Tensor,
    distances: Tensor,
    epsilon: float,
    logit_scale: float = 1.0,
    weight: float = 1.0,
) -> Tensor:
    """Cross-entropy plus `weight` times KL(p ‖ p⊥), GloRo style.

    p⊥ has one more class ⊥, the best that an attack on the predicted class can reach:
    logit_⊥ = max_{j≠top}(logit_j + ε·c_top,j). Adding a class divides every probability by the same
    factor, so the divergence is the difference of the two log-normalisers.
    """
    top = logits.argmax(1, keepdim=True)
    attacked = (logits + epsilon * distances[top.squeeze(1)]).scatter(1, top, float("-inf"))
    bottom = attacked.max(1, keepdim=True).values
    with_bottom = torch.cat([logits, bottom], dim=1) * logit_scale
    divergence = with_bottom.logsumexp(1) - (logit_scale * logits).logsumexp(1)
    return F.cross_entropy(logit_scale * logits, labels) + weight * divergence.mean()


def logit_annealing_loss(
    logits: Tensor,
    labels: Tensor,
    distances: Tensor,
    epsilon: float,
    logit_scale: float = 1.0,
    temperature: float = 0.75,
    offset: float = 2.0,
    power: float = 5.0,
) -> Tensor:
    """BRONet's: -T·(1-p)^β·log p, p the label's probability at temperature T, its logit less ξ.

    It stops pushing samples that have enough margin. The logits are EMMA's, as BRONet trains it.
    """
    shifted = logit_scale * emma_logits(logits, labels, distances, epsilon)
    shifted = shifted - offset * F.one_hot(labels, logits.shape[1]).to(shifted.dtype)
    log_p = F.log_softmax(shifted / temperature, dim=1).gather(1, labels[:, None]).squeeze(1)
    # 1-p may round to 0, where the power's gradient is not finite for exponents below one.
    doubt = (-torch.expm1(log_p)).clamp_min(1e-12)
    return -temperature * (doubt**power * log_p).mean()


def compute_loss(
    config: LossConfig, logits: Tensor, labels: Tensor, distances: Tensor, epsilon: float
) -> Tensor:
    """The configured loss at the training radius ε."""
    arguments = (logits, labels, distances, epsilon, config.logit_scale)
    if config.name == "emma":
        return emma_loss(*arguments)
    if config.name == "margin":
        return margin_loss(*arguments)
    if config.name == "trades":
        return trades_loss(*arguments, weight=config.trades_weight)
    if config.name == "logit_annealing":
        return logit_annealing_loss(
            *arguments,
            temperature=config.annealing_temperature,
            offset=config.annealing_offset,
            power=config.annealing_power,
        )
    return F.cross_entropy(config.logit_scale * logits, labels)
