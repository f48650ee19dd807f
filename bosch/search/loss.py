"""Anchors and loss of a head mask (BOSCH Eq. 2, 3 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

from bosch.errors import UserError


@dataclass(frozen=True)
class Anchors:
    """Scores with every head sliding and every head full, for the normalisation of S(z)."""

    all_sliding: float
    all_full: float

    def check(self) -> None:
        """Raise UserError if the calibration set cannot distinguish good masks from bad ones."""
        if self.all_full <= 0.0:
            raise UserError(
                "search: the model with full attention answers none of the calibration examples, "
                "so all masks score the same; make prepare.calibration easier or use a "
                "model that can retrieve"
            )
        if self.all_sliding >= self.all_full:
            raise UserError(
                f"search: with every head sliding the calibration score ({self.all_sliding:.4g}) "
                f"is no lower than with full attention ({self.all_full:.4g}), so there is nothing "
                "to search for; lower search.window_size or raise prepare.calibration.length"
            )


@dataclass(frozen=True)
class Loss:
    """loss(z; rho, I) = -S^(z) + alpha (rho_I(z) - rho)^2 with anchors a and b.

    rho is the sub-problem's quota over its size, so a mask on budget has no penalty.
    """

    anchors: Anchors
    alpha: float = 100.0
    gamma: float = 0.2

    @property
    def score_range(self) -> float:
        """b - a of Eq. 2, b = (1 + gamma) S(all full)."""
        return (1.0 + self.gamma) * self.anchors.all_full - self.anchors.all_sliding

    def value(self, score: float, sliding: int, quota: int, size: int) -> float:
        """Eq. 5 for `sliding` of `size` units sliding on a budget of `quota`."""
        normalised = (score - self.anchors.all_sliding) / self.score_range  # Eq. 2
        return -normalised + self.alpha * ((sliding - quota) / size) ** 2
